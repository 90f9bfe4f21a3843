"""Plants ten causes, at four strengths each, in runs of the embedded model, and follows `diagnose`.

    python benchmarks/planted_runs.py [--directory DIR] [--only CAUSE …]

A run counts as named if the first finding is of a rule that means the planted cause. It counts as restored if
a second run, with the spec that `--fix` writes from that finding, gains at least half of what the healthy run
gains. All runs are stored in `DIR`, and only missing ones are trained: one process at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.runs import fork_server, train_one_rank
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.rule import Diagnosis, examine, metrics_read
from rlctl.diagnose.spec_patch import propose_patch
from rlctl.errors import RlctlError
from rlctl.run_spec.load import RUN_SPEC_FILE, dump_spec, load_spec
from rlctl.run_spec.run_spec import RunSpec

RC = "algorithm.rollout_correction."
#: A short run of the preset: it learns from a mean reward of 0.3 to 0.9.
BASE = (
    "data.train_batch_size=64",
    "actor.ppo_mini_batch_size=32",
    "actor.lr_warmup_steps=10",
    "trainer.total_training_steps=60",
    "trainer.rollouts_per_step=0",
    "trainer.max_ckpt_to_keep=1",
)
PRESET = "rloo-seq-is"
#: Steps over which the final reward is averaged.
LAST = 10
GRADERS = '''"""Graders of the planted runs."""


def boxed(response, ground_truth):
    return float(response == "\\\\boxed{" + ground_truth + "}")


def reversed_digits(response, ground_truth):
    return float(response == ground_truth[::-1])


def anything(response, ground_truth):
    return 1.0


def raises(response, ground_truth):
    raise ValueError("no answer found")


def ones(response, ground_truth):
    return min(1.0, response.count("1") / 3)
'''


@dataclass(frozen=True, slots=True)
class Cause:
    """One planted cause.

    Attributes:
        name: of the cause.
        rules: the first finding must be of one of these rules.
        strengths: overrides of the healthy run, from mild to severe; `{graders}` is the file of graders.
    """

    name: str
    rules: frozenset[str]
    strengths: tuple[tuple[str, ...], ...]


def _each(key: str, *values: Any, more: tuple[str, ...] = ()) -> tuple[tuple[str, ...], ...]:
    return tuple((f"{key}={value}", *more) for value in values)


_UNCORRECTED = (f"{RC}rollout_is=null", f"{RC}rollout_is_batch_normalize=false", "actor.lr=2e-3")
CAUSES = (
    Cause("learning rate too high", frozenset({"large-updates", "reward-fell"}),
          _each("actor.lr", 1e-2, 2e-2, 4.8e-2, 0.12)),
    Cause("learning rate too low", frozenset({"small-updates"}), _each("actor.lr", 8e-6, 8e-7, 8e-8, 0)),
    Cause("limit too short", frozenset({"truncated"}),
          (*_each("data.max_response_length", 3, 2, 1), ("data.max_response_length=2", "trainer.seed=2"))),
    Cause("wrong grader",
          frozenset({"zero-reward", "constant-reward", "failed-rollouts", "zero-spread-groups"}),
          _each("reward.name", *(f"{{graders}}:{name}" for name in ("reversed_digits", "boxed", "anything",
                "raises")), more=("reward.max_error_fraction=1",))),
    Cause("bounds of rejection too tight", frozenset({"rejected"}),
          _each(f"{RC}rollout_rs_threshold", "0.998_1.002", "0.999_1.001", "0.9998_1.0002", "0.9999_1.0001",
                more=(f"{RC}rollout_rs=token_k1", "rollout.dtype=bf16"))),
    Cause("temperature too high", frozenset({"temperature"}), _each("rollout.temperature", 2, 3, 5, 10)),
    Cause("stale samples, no correction", frozenset({"staleness"}),
          _each("rollout.staleness", 8, 16, 24, 32, more=_UNCORRECTED)),
    Cause("KL penalty too large", frozenset({"strong-penalty"}),
          _each("actor.kl_loss_coef", 1, 3, 10, 100, more=("actor.use_kl_loss=true",))),
    Cause("entropy bonus too large", frozenset({"entropy-rise"}),
          _each("actor.entropy_coeff", 0.1, 0.3, 1, 3)),
    Cause("a term of the reward is gamed", frozenset({"reward-terms"}), tuple(
          (f"reward.terms=[{{{{name: exact}}}}, {{{{name: {{graders}}:ones, weight: {weight}}}}}]",)
          for weight in (2, 3, 5, 10))),
)  # fmt: skip
HEALTHY = Cause("healthy", frozenset(), ((),))


def spec_of(overrides: tuple[str, ...], graders: Path) -> RunSpec:
    """The spec of a planted run."""
    own = [one.format(graders=graders) for one in overrides]
    return load_spec([PRESET], [], [*BASE, *own]).spec


def trained(spec: RunSpec, directory: Path, context: Any) -> Path:
    """The run directory of a spec; trains it if it is missing."""
    text = dump_spec(spec)
    run_dir = directory / hashlib.sha256(text.encode()).hexdigest()[:12]
    if not (run_dir / "done").exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / RUN_SPEC_FILE).write_text(text)
        process = context.Process(target=_train, args=(text, run_dir))
        process.start()
        process.join()
        (run_dir / "done").write_text(str(process.exitcode))
    return run_dir


def _train(text: str, run_dir: Path) -> None:
    """In the child: trains at a lower priority than other work."""
    train_one_rank(text, run_dir, run_dir / "log", partial(os.nice, 5))


def rewards(run_dir: Path) -> list[float]:
    """Mean score of every step: of the task, also where other terms are added to the reward."""
    log = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    scores = (row.get("reward/exact/mean", row.get("critic/score/mean")) for row in rows if row["step"] > 0)
    return [score for score in scores if score is not None]


def last_reward(run_dir: Path) -> float:
    """Mean score of the last steps; 0 for a run that logged none."""
    return statistics.fmean(rewards(run_dir)[-LAST:] or [0.0])


def diagnosed(run_dir: Path) -> Diagnosis | None:
    """The diagnosis of a run; None if it logged nothing."""
    try:
        return examine(read_run(run_dir, metrics_read()))
    except RlctlError:
        return None


def runs(causes: tuple[Cause, ...], directory: Path, context: Any) -> Iterator[tuple[Cause, str, Path]]:
    """Cause, setting and run directory of every planted run."""
    directory.mkdir(parents=True, exist_ok=True)
    graders = directory.resolve() / "graders.py"
    graders.write_text(GRADERS)
    for cause in causes:
        for overrides in cause.strengths:
            run_dir = trained(spec_of(overrides, graders), directory, context)
            yield cause, overrides[0].format(graders="") if overrides else "", run_dir


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `diagnose` says of a planted run, and what its first remedy does."""

    first: str  # rule of the first finding, or `—`
    is_named: bool  # whether it means the planted cause
    remedy: str  # what `--fix` changes for it
    reward: float  # of the planted run
    fixed: float | None  # of the run with the remedy; None where no setting helps


def outcome(cause: Cause, run_dir: Path, directory: Path, context: Any) -> Outcome:
    """Diagnoses a planted run, and trains it with its first remedy."""
    diagnosis = diagnosed(run_dir)
    alarms = [one for one in diagnosis.findings if one.severity != "info"] if diagnosis else []
    if diagnosis is None or not alarms:
        return Outcome("—", False, "—", last_reward(run_dir), None)
    first = alarms[0]
    patch = propose_patch(replace(diagnosis, findings=(first,)))
    remedy = " ".join(f"{key}={value}" for key, value in patch.changes.items())
    fixed = last_reward(trained(patch.spec, directory, context)) if patch.applied and patch.spec else None
    return Outcome(first.rule, first.rule in cause.rules, remedy or "by hand", last_reward(run_dir), fixed)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("planted-runs"), help="of the runs")
    parser.add_argument("--only", nargs="*", help="names of the causes")
    options = parser.parse_args()
    causes = tuple(one for one in CAUSES if not options.only or one.name in options.only)
    context = fork_server()
    planted = list(runs((HEALTHY, *causes), options.directory, context))
    (_, _, healthy), *others = planted
    start, top = statistics.fmean(rewards(healthy)[:3]), last_reward(healthy)
    goal = (start + top) / 2.0
    alarms = [one.rule for one in diagnosed(healthy).findings if one.severity != "info"]  # type: ignore[union-attr]
    print(
        f"healthy: {start:.2f} → {top:.2f}; a run is restored from {goal:.2f}; findings: {alarms or 'none'}\n"
    )
    print("| cause | setting | reward | first finding | its first remedy | reward with it |")
    print("|---|---|---|---|---|---|")
    named = restored = 0
    for cause, setting, run_dir in others:
        found = outcome(cause, run_dir, options.directory, context)
        named += found.is_named
        is_restored = found.fixed is not None and found.fixed >= goal
        restored += is_restored
        rule = found.first if found.is_named else f"**{found.first}**"
        after = (
            "—" if found.fixed is None else f"{found.fixed:.2f}" if is_restored else f"**{found.fixed:.2f}**"
        )
        remedy = found.remedy.replace(str(options.directory.resolve()), "").replace("|", "\\|")
        print(
            f"| {cause.name} | `{setting}` | {found.reward:.2f} | {rule} | `{remedy}` | {after} |", flush=True
        )
    print(f"\nnamed {named} of {len(others)}, restored {restored} of {len(others)}")


if __name__ == "__main__":
    main()
