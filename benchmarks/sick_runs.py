"""Trains sick runs of the embedded model, diagnoses them, and trains them again with what `--fix` writes.

    python benchmarks/sick_runs.py [--directory DIR] [--seeds 1-3] [--part developed] [--only KIND …]
                                   [--minutes 120] [--table]

Each kind of fault is planted in the two presets where it matters most, with every seed, by a setting, a
grader or a patch of the training process (`benchmarks/studies/sick_faults.py`). The rules of `diagnose` were
developed with the kinds of the first part, and later extended with what those of the second showed, which had
been looked at once before; those of the third were planted after that, and looked at once.

- Named: the first finding is of a rule, and has words, that mean the planted fault.
- Remedy: the training is repeated with the spec that `--fix` writes; a patch stays, as it would in a program
  that has the fault. The final reward is the score of the last validation, sampled at temperature 1, which is
  always graded as it should be.
- Restored: the repeated run gains at least half of what the healthy run of this preset and seed gains. Only
  for faults of a setting: no setting repairs a program.

Runs are stored in `DIR` and trained where they are missing, until the time is over; `--table` only prints.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.intervals import mean_interval
from benchmarks.learning import seeds_of
from benchmarks.runs import fork_server, train_one_rank
from benchmarks.studies.planted import DECOUPLED, RC
from benchmarks.studies.sick_faults import GRADERS, PATCHES
from rlctl.diagnose.finding import Finding
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import Diagnosis, examine, metrics_read
from rlctl.diagnose.spec_patch import propose_patch
from rlctl.errors import RlctlError
from rlctl.report.run_dumps import with_dumps
from rlctl.run_spec.load import RUN_SPEC_FILE, dump_spec, load_spec
from rlctl.run_spec.run_spec import RunSpec

Part = Literal["developed", "extended", "new"]
STEPS = 40
_SHORT = (
    f"trainer.total_training_steps={STEPS}",
    *("data.train_batch_size=16", "actor.ppo_mini_batch_size=8", "actor.lr_warmup_steps=10"),
)
_ALL = (
    *("trainer.test_freq=10", "trainer.save_freq=20", "trainer.max_ckpt_to_keep=null"),
    *("trainer.rollouts_per_step=32", "reward.max_error_fraction=1", "rollout.val_kwargs.temperature=1"),
)
#: Name → preset and settings of the healthy run.
PRESETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bypass": ("rloo-seq-is", _SHORT),
    "decoupled": ("grpo-uncorrected", (*_SHORT, *DECOUPLED)),
    "grpo": ("grpo", _SHORT),
    "ppo": ("ppo", (*_SHORT, "actor.ppo_epochs=2")),
    "ahead": ("rloo-seq-is", (*_SHORT, "rollout.max_staleness=1")),
    "agent": ("guess-number", ("trainer.total_training_steps=30", "rollout.n=8")),
}


@dataclass(frozen=True, slots=True)
class Sick:
    """A kind of fault.

    Attributes:
        name: what is wrong.
        rules: the first finding must be of one of these rules.
        cases: presets, with the settings that plant the fault there.
        words: a pattern that its sentence, cause or remedies must contain.
        grader: function of the file of graders, used in the place of the right one.
        patch: function of `PATCHES`.
        is_setting: whether a setting is the fault, so that another one can restore the run.
    """

    name: str
    rules: frozenset[str]
    cases: tuple[tuple[str, tuple[str, ...]], ...]
    words: str = ""
    grader: str = "right"
    patch: str = ""
    is_setting: bool = False


def _in(presets: str, *overrides: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((preset, overrides) for preset in presets.split())


def _rules(names: str) -> frozenset[str]:
    return frozenset(names.split())


_GAP = _rules("policy-gap probability-gap stale-weights weight-mean sampler-log-probs who-sampled")
_SYNC = "synchroni|weight sync|prove-sync|never delivered|weights"
_GRADER = "grader|reward"
#: Kinds with which the rules were developed.
DEVELOPED = (
    Sick("weights never reach the engine", _GAP, _in("bypass decoupled"), _SYNC, patch="never_synced"),
    Sick("rate × 100", _rules("large-updates reward-fell"), _in("bypass grpo", "actor.lr=8e-2"),
         is_setting=True),
    Sick("rate ÷ 100", _rules("small-updates"), _in("bypass grpo", "actor.lr=8e-6"), is_setting=True),
    Sick("constant reward", _rules("constant-reward"), _in("bypass ppo"), _GRADER, grader="minus_one"),
    Sick("temperature unsaid", _rules("sampled-otherwise"), _in("decoupled ppo"), "temperature",
         patch="hidden_temperature"),
    Sick("log-probs of the token before", _GAP, _in("bypass decoupled"), "log-prob", patch="shifted"),
    Sick("log-probs are 0", _rules("missing-log-probs"), _in("bypass decoupled"), patch="missing"),
    Sick("limit too short", _rules("truncated"), _in("bypass ppo", "data.max_response_length=2"),
         is_setting=True),
    Sick("stale samples, no correction", _rules("staleness"),
         _in("bypass decoupled", "rollout.staleness=16", f"{RC}rollout_is=null",
             f"{RC}rollout_is_batch_normalize=false"), is_setting=True),
    Sick("KL penalty too large", _rules("strong-penalty"),
         _in("bypass grpo", "actor.use_kl_loss=true", "actor.kl_loss_coef=10"), is_setting=True),
    Sick("a reward is hacked", _rules("reward-hacking reward-terms length-growth"),
         _in("bypass grpo", "actor.lr=2e-3"), grader="ones"),
    Sick("advantages negated", _rules("reward-fell"), _in("bypass grpo"), patch="advantages_negated"),
    Sick("dropout in scoring", _rules("nondeterminism") | _GAP, _in("decoupled grpo"), patch="noisy"),
    Sick("the end is lost", _rules("truncated cut-vocabulary"), _in("bypass grpo"), patch="end_lost"),
    Sick("wrong reference", _rules("reference-drift"), _in("bypass grpo", "actor.use_kl_loss=true"),
         "reference", patch="other_reference"),
    Sick("endless warm-up", _rules("small-updates"), _in("bypass ahead", "actor.lr_warmup_steps=100000"),
         "warm-up", is_setting=True),
)  # fmt: skip
#: Looked at once; then the rules were extended with what these kinds showed.
EXTENDED = (
    Sick("weights reach the engine late", _GAP | {"staleness"}, _in("bypass ahead"), _SYNC,
         patch="late_sync"),
    Sick("one sick replica", _GAP, _in("bypass decoupled"), _SYNC, patch="sick_replica"),
    Sick("another prompt (template)", _GAP | {"sampled-otherwise"}, _in("bypass decoupled"),
         "log-prob|template", patch="other_prompt"),
    Sick("top-p unsaid", _rules("sampled-otherwise cut-vocabulary"), _in("bypass decoupled"),
         "top-p|vocabulary", patch="hidden_top_p"),
    Sick("log-probs clamped", _GAP | {"cut-vocabulary", "sampled-otherwise"}, _in("bypass decoupled"),
         "log-prob", patch="clamped"),
    Sick("scored off by one", _GAP | {"sampled-otherwise", "large-updates"}, _in("decoupled ppo"),
         "log-prob|token", patch="scored_off_by_one"),
    Sick("raw log-probs at a temperature", _GAP, _in("bypass decoupled", "rollout.temperature=0.7"),
         "temperature|log-prob", patch="raw_log_probs"),
    Sick("inverted reward", _rules("reward-hacking reward-fell"), _in("bypass ppo"), _GRADER,
         grader="inverted"),
    Sick("rewards of another response", _rules("flat-reward reward-hacking entropy unsteady-reward"),
         _in("bypass grpo"), grader="of_another_response"),
    Sick("labels of another prompt", _rules("zero-reward zero-spread-groups constant-reward"),
         _in("bypass grpo"), _GRADER, grader="of_another_prompt"),
    Sick("random rewards", _rules("flat-reward reward-hacking entropy entropy-rise unsteady-reward"),
         _in("bypass ppo"), grader="noise"),
    Sick("a grader that raises", _rules("failed-rollouts"), _in("bypass grpo"), _GRADER, grader="raises"),
    Sick("wrong format expected", _rules("zero-reward constant-reward"), _in("bypass ppo"), _GRADER,
         grader="boxed"),
    Sick("KL sign", _rules("reference-drift entropy-rise reward-fell"),
         _in("bypass grpo", "actor.use_kl_loss=true", "actor.kl_loss_coef=1"), patch="kl_negated"),
    Sick("updates are lost", _rules("small-updates frozen"), _in("bypass grpo"), patch="updates_lost"),
    Sick("optimizer state lost", _rules("large-updates gradient-norm reward-fell optimizer-state"),
         _in("bypass ppo"), patch="optimizer_state_lost"),
    Sick("one prompt only", _rules("reward-hacking zero-spread-groups"), _in("bypass grpo"),
         patch="one_prompt"),
    Sick("bounds of rejection too tight", _rules("rejected"),
         _in("bypass decoupled", f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=0.9998_1.0002",
             "rollout.dtype=bf16"), is_setting=True),
    Sick("temperature too high", _rules("temperature"), _in("bypass ppo", "rollout.temperature=4"),
         is_setting=True),
    Sick("entropy bonus too large", _rules("entropy-rise"), _in("bypass grpo", "actor.entropy_coeff=0.3"),
         is_setting=True),
    Sick("critic that does not learn", _rules("critic"), _in("ppo", "critic.lr=1e-12"), is_setting=True),
)  # fmt: skip
#: Planted after that, and looked at once.
NEW = (
    Sick("temperature too low", _rules("temperature zero-spread-groups entropy"),
         _in("bypass ppo", "rollout.temperature=0.1"), is_setting=True),
    Sick("length pays", _rules("reward-hacking length-growth truncated"), _in("bypass grpo"),
         grader="longer"),
    Sick("KL in the reward too large", _rules("strong-penalty"),
         _in("grpo ppo", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=10"), is_setting=True),
    Sick("rate of the critic too high", _rules("critic not-finite"), _in("ppo", "critic.lr=1"),
         is_setting=True),
    Sick("a judge that errs", _rules("unsteady-reward"), _in("bypass ppo"), grader="errs"),
    Sick("rewards shuffled", _rules("unsteady-reward"), _in("bypass grpo"), patch="rewards_shuffled"),
    Sick("engine stops early", _rules("truncated length-collapse zero-reward"), _in("bypass decoupled"),
         patch="stops_early"),
    Sick("weight decay too large", _rules("large-updates reward-fell entropy-rise random-tokens"),
         _in("bypass grpo", "actor.weight_decay=100"), is_setting=True),
    Sick("too many passes over a batch", _rules("bypass-repeats large-updates"),
         _in("bypass grpo", "actor.ppo_epochs=30"), is_setting=True),
    Sick("only punished", _rules("entropy-rise reward-fell truncated large-updates"), _in("bypass grpo"),
         patch="only_punished"),
)  # fmt: skip
PARTS: dict[Part, tuple[Sick, ...]] = {"developed": DEVELOPED, "extended": EXTENDED, "new": NEW}


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a run.

    Attributes:
        reward: score of the last validation; None: the run had none.
        at_start: score of the first one.
    """

    run_dir: Path
    reward: float | None
    at_start: float | None


@dataclass(slots=True)
class Trainer:
    """Trains missing runs, one at a time, until the time is over."""

    directory: Path
    deadline: float
    is_table: bool
    context: Any = field(default_factory=fork_server)

    def run(self, spec: RunSpec, patch: str) -> Trained | None:
        """The run of a spec with a patch; None where it is missing and may not be trained."""
        text = dump_spec(spec)
        name = hashlib.sha256(f"{patch}\n{text}".encode()).hexdigest()[:12]
        run_dir = self.directory / name
        if not (run_dir / "done").exists():
            if self.is_table or time.monotonic() > self.deadline:
                return None
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / RUN_SPEC_FILE).write_text(text)
            process = self.context.Process(target=_train, args=(text, patch, run_dir))
            start = time.monotonic()
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"exit code {process.exitcode}: see {run_dir}/log")
            (run_dir / "done").write_text(f"{time.monotonic() - start:.1f} s")
        scores = scores_at_ends(run_dir) if spec.environment.name != "single_turn" else validations(run_dir)
        return Trained(run_dir, scores[-1] if scores else None, scores[0] if scores else None)


def _train(text: str, patch: str, run_dir: Path) -> None:
    """In the child: trains with a patch, if any."""
    train_one_rank(text, run_dir, run_dir / "log", PATCHES[patch] if patch else None)


def validations(run_dir: Path) -> list[float]:
    """Scores of a run's validations."""
    scored = re.compile(r"val/.+/reward_mean")
    return [value for row in _logged(run_dir) for key, value in row.items() if scored.fullmatch(key)]


def scores_at_ends(run_dir: Path) -> list[float]:
    """Mean reward of the first steps and of the last ones, of an agent, whose game grades itself."""
    rewards = [row["critic/score/mean"] for row in _logged(run_dir) if "critic/score/mean" in row]
    return [statistics.fmean(rewards[:3]), statistics.fmean(rewards[-10:])] if rewards else []


def _logged(run_dir: Path) -> list[dict[str, Any]]:
    log = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def spec_of(preset: str, overrides: Sequence[str], seed: int, grader: str, graders: Path) -> RunSpec:
    """The spec of a run."""
    name, base = PRESETS[preset]
    graded = () if preset == "agent" else (f"reward.name={graders}:{grader}",)
    seeded = f"trainer.seed={seed}"
    return load_spec([name], [], [*base, *_ALL, *graded, *overrides, seeded]).spec


def diagnosed(run_dir: Path) -> Diagnosis | None:
    """The diagnosis of a run with its dumps; None if it logged nothing."""
    try:
        return examine(with_dumps(read_run(run_dir, metrics_read()), trust=True))
    except RlctlError:
        return None


def alarms(diagnosis: Diagnosis | None) -> list[Finding]:
    """Findings above a remark, the first one first."""
    return [one for one in diagnosis.findings if one.severity != "info"] if diagnosis else []


def is_named(kind: Sick, first: Finding) -> bool:
    """Whether a finding means the planted fault."""
    text = " ".join((first.what, first.cause, *map(str, first.fixes), *(fix.why for fix in first.fixes)))
    return first.rule in kind.rules and re.search(kind.words, text) is not None


@dataclass(frozen=True, slots=True)
class Row:
    """A sick run, what is said of it, and what the remedy does."""

    kind: Sick
    preset: str
    seed: int
    first: str
    named: bool
    remedy: str
    reward: float
    fixed: float | None  # None: no setting is changed
    restored: bool | None  # None: not asked


def rows(trainer: Trainer, kinds: Sequence[Sick], seeds: Sequence[int], graders: Path) -> Iterator[Row]:
    """The rows whose runs are there or could be trained: seed by seed, first presets before second ones."""
    for seed in seeds:
        for which in (0, 1):
            for kind, (preset, overrides) in [
                (kind, kind.cases[which]) for kind in kinds if kind.cases[which:]
            ]:
                healthy = trainer.run(spec_of(preset, (), seed, "right", graders), "")
                sick = trainer.run(spec_of(preset, overrides, seed, kind.grader, graders), kind.patch)
                if healthy and sick and (row := _row(trainer, kind, preset, seed, healthy, sick)):
                    print(_line(row), file=sys.stderr, flush=True)
                    yield row


def _row(trainer: Trainer, kind: Sick, preset: str, seed: int, healthy: Trained, sick: Trained) -> Row | None:
    diagnosis = diagnosed(sick.run_dir)
    found = alarms(diagnosis)
    reward = sick.reward or 0.0
    if diagnosis is None or not found:
        return Row(kind, preset, seed, "—", False, "—", reward, None, False if kind.is_setting else None)
    patch, fixed = propose_patch(diagnosis), None
    remedy = " ".join(f"{key}={value}" for key, value in patch.changes.items())
    if patch.applied and patch.spec is not None:
        again = trainer.run(patch.spec, kind.patch)
        if again is None:
            return None
        fixed = again.reward or 0.0
    restored = None
    if kind.is_setting:
        start, top = healthy.at_start or 0.0, healthy.reward or 0.0
        restored = fixed is not None and fixed >= (start + top) / 2.0
    return Row(
        kind,
        preset,
        seed,
        found[0].rule,
        is_named(kind, found[0]),
        remedy or "by hand",
        reward,
        fixed,
        restored,
    )


def _line(row: Row) -> str:
    named = row.first if row.named else f"**{row.first}**"
    fixed = "—" if row.fixed is None else f"{row.fixed:.2f}"
    restored = {None: "", True: "yes", False: "**no**"}[row.restored]
    return (
        f"| {row.kind.name} | {row.preset} | {row.seed} | {named} | {_shown_remedy(row)} | {row.reward:.2f} "
        f"| {fixed} | {restored} |"
    )


def _of_kind(runs: Sequence[Row]) -> str:
    """A line of the table by kinds of faults, which docs/evidence/diagnose-validation.md shows."""
    firsts = Counter(row.first if row.named else f"**{row.first}**" for row in runs)
    remedies = Counter(_shown_remedy(row) for row in runs)
    fixed = [row for row in runs if row.fixed is not None]
    asked = [row.restored for row in runs if row.restored is not None]
    cells = (
        runs[0].kind.name,
        f"{sum(row.named for row in runs)} of {len(runs)}",
        ", ".join(f"{first} {count}" if len(firsts) > 1 else first for first, count in firsts.most_common()),
        remedies.most_common(1)[0][0],
        f"{statistics.fmean(row.reward for row in runs):.2f}",
        f"{statistics.fmean(row.fixed or 0.0 for row in fixed):.2f}" if fixed else "—",
        f"{sum(asked)} of {len(asked)}" if asked else "",
    )
    return f"| {' | '.join(cells)} |"


def _shown_remedy(row: Row) -> str:
    remedy = re.sub(r"/\S+/graders.py", "graders.py", row.remedy).replace("|", "\\|")
    remedy = remedy.replace("algorithm.rollout_correction.", "")
    return remedy if row.remedy in {"by hand", "—"} else f"`{remedy}`"


def by_kind(found: Sequence[Row]) -> Iterator[str]:
    """A table with a line per kind."""
    headings = "fault | named | first finding | most frequent remedy | reward | with a remedy | restored"
    yield f"| {headings} |"
    yield "|---|---|---|---|---|---|---|"
    for name in dict.fromkeys(row.kind.name for row in found):
        yield _of_kind([row for row in found if row.kind.name == name])


def summary(title: str, found: Sequence[Row], expected: int) -> Iterator[str]:
    """Shares of rows, and the difference that the remedies make, with their intervals."""
    if not found:
        yield f"{title}: no run yet of {expected}"
        return
    named = sum(row.named for row in found)
    asked = [row.restored for row in found if row.restored is not None]
    changes = [row.fixed - row.reward for row in found if row.fixed is not None]
    share = f"{named} of {len(found)} ({named / len(found):.0%})"
    yield f"{title}: {len(found)} of {expected} runs; named {share}"
    if asked:
        yield f"- faults of settings restored: {sum(asked)} of {len(asked)} ({sum(asked) / len(asked):.0%})"
    if len(changes) > 1:
        mean, low, high = mean_interval(changes)
        worse = sum(change < -0.05 for change in changes)
        yield (
            f"- reward with the remedy minus without it, {len(changes)} runs: {mean:+.2f} (95 %: "
            f"{low:+.2f} to {high:+.2f}); lower by more than 0.05 in {worse}, lowest {min(changes):+.2f}"
        )


def healthy_lines(trainer: Trainer, seeds: Sequence[int], graders: Path) -> Iterator[str]:
    """A line per healthy preset: reward at the start and at the end, and findings above a remark."""
    for preset in PRESETS:
        runs = [trainer.run(spec_of(preset, (), seed, "right", graders), "") for seed in seeds]
        there = [one for one in runs if one is not None]
        if not there:
            continue
        found = [one.rule for run in there for one in alarms(diagnosed(run.run_dir))]
        starts = statistics.fmean(run.at_start or 0.0 for run in there)
        ends = statistics.fmean(run.reward or 0.0 for run in there)
        yield f"| {preset} | {len(there)} | {starts:.2f} → {ends:.2f} | {', '.join(found) or 'none'} |"


def main() -> None:
    """Trains what is missing and prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("sick-runs"), help="of the runs")
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-3"), help="1-3 or 1,4")
    parser.add_argument("--part", choices=[*PARTS], help="only these kinds")
    parser.add_argument("--only", nargs="*", help="names of kinds")
    parser.add_argument("--minutes", type=float, default=120.0, help="after which no run is begun")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    graders = directory / "graders.py"
    graders.write_text(GRADERS)
    trainer = Trainer(directory, time.monotonic() + 60.0 * options.minutes, options.table)
    print("| healthy runs of | runs | validation | findings above a remark |\n|---|---|---|---|")
    if not options.only:
        print("\n".join(healthy_lines(trainer, options.seeds, graders)))
    for part, kinds in PARTS.items():
        if options.part not in {None, part}:
            continue
        chosen = tuple(one for one in kinds if not options.only or one.name in options.only)
        found = list(rows(trainer, chosen, options.seeds, graders))
        expected = len(options.seeds) * sum(len(one.cases) for one in chosen)
        headings = "fault | preset | seed | first finding | its remedy | reward | with the remedy | restored"
        print(f"\n{part}\n\n| {headings} |")
        print("|---|---|---|---|---|---|---|---|")
        print("\n".join(map(_line, found)))
        print("\n" + "\n".join(by_kind(found)))
        print("\n" + "\n".join(summary(part, found, expected)), flush=True)


if __name__ == "__main__":
    main()
