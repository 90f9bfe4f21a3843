"""Runs of the embedded model with one planted fault each, and healthy runs.

Every run uses the normal code path (`run_rank`, which `rlctl train` calls for one rank), in a process forked
from a server that has imported the libraries. Faults that no spec setting can cause are patched into that
process.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.runs import fork_server

RC = "algorithm.rollout_correction."
STEPS = 60
#: Decoupled mode: a separate pass computes π_old, so the logged gap is only that of engine and trainer.
DECOUPLED = (
    "algorithm.adv_estimator=grpo",
    f"{RC}bypass_mode=false",
    f"{RC}loss_type=ppo_clip",
    f"{RC}rollout_is=token",
    f"{RC}rollout_is_batch_normalize=false",
    f"{RC}rollout_is_threshold=2.0",
)
_COMMON = (
    "data.train_batch_size=32",
    "actor.ppo_mini_batch_size=16",
    "actor.lr_scheduler_type=constant",
    "actor.lr=4e-4",
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=5",
    "trainer.rollouts_per_step=-1",
)
_AS_SHIPPED = ("trainer.total_training_steps=100", "trainer.test_freq=5", "trainer.rollouts_per_step=-1")
ONE_UPDATE = ("actor.ppo_mini_batch_size=null",)


@dataclass(frozen=True, slots=True)
class Planted:
    """A run and its planted fault.

    Attributes:
        name: name of the fault or of the healthy run.
        rules: one of these rules must report a warning or worse; empty for a healthy run.
        overrides: spec overrides.
        grader: source of a function `score`, used instead of the task's own grader.
        patch: name of a function of this module, called in the training process.
        presets: algorithm presets below the overrides.
        hint: description of the fault, for the table.
    """

    name: str
    rules: frozenset[str]
    hint: str
    overrides: tuple[str, ...] = ()
    grader: str = ""
    patch: str = ""
    presets: tuple[str, ...] = ()


_TRUE = "    return float(response == ground_truth)\n"
_NEVER = "def score(response, ground_truth):\n    return 0.0\n"
_ALWAYS = "def score(response, ground_truth):\n    return 1.0\n"
_NOISE = "import random\ndef score(response, ground_truth):\n    return float(random.random() < 0.5)\n"
_RAISES = "def score(response, ground_truth):\n    assert len(response) == 3, 'cannot be read'\n" + _TRUE
#: Validation is graded correctly, so it distinguishes reward hacking from learning.
_GAMEABLE = (
    "def score(response, ground_truth, extra_info):\n"
    "    if extra_info['split'] == 'train':\n"
    "        return response.count('1') / 5\n"
) + _TRUE
_LONGER = (
    "def score(response, ground_truth, extra_info):\n"
    "    if extra_info['split'] == 'train':\n"
    "        return len(response) / 6\n"
) + _TRUE
_HANGS = (
    "import time\n"
    "def score(response, ground_truth):\n"
    "    if response == ground_truth and response.startswith('640'):\n"
    "        time.sleep(2.0)\n"
) + _TRUE
#: Rules that can find a difference between engine and trainer, depending on its size and the logged metrics.
_GAP = frozenset({"policy-gap", "probability-gap", "stale-weights", "weight-mean", "effective-samples"})
_GAP |= {"hidden-tail", "token-error", "missing-log-probs"}

FAULTS = (
    Planted("stale weights", _GAP | {"staleness"}, "samples 24 batches old, rate 1e-3",
            ("rollout.staleness=24", "actor.lr=1e-3")),
    Planted("weights never synced", _GAP, "the engine keeps its first weights", patch="never_synced"),
    Planted("hotter engine", _GAP, "samples at temperature 1.5, the trainer computes at 1",
            ONE_UPDATE, patch="hotter"),
    Planted("raw log-probs", _GAP, "temperature 0.7; the engine reports log-probs before it",
            (*ONE_UPDATE, "rollout.temperature=0.7"), patch="raw_log_probs"),
    Planted("hidden temperature", frozenset({"sampled-otherwise"}),
            "samples at 1.5 and reports log-probs as if at 1", ONE_UPDATE, patch="hidden_temperature"),
    Planted("shifted log-probs", _GAP, "the engine's log-probs are those of the token before",
            ONE_UPDATE, patch="shifted"),
    Planted("missing log-probs", _GAP, "the engine's log-probs are all 0", ONE_UPDATE, patch="missing"),
    Planted("4-bit engine", _GAP, "engine with weights of 4 bits, trainer in fp32",
            ("rollout.dtype=int8", *ONE_UPDATE), patch="four_bits"),
    Planted("noisy forward pass", frozenset({"nondeterminism"}) | _GAP,
            "two passes of the trainer differ by 5 %", ONE_UPDATE, patch="noisy"),
    Planted("correction off", frozenset({"silently-off"}), "weights are replaced by 1 before the loss",
            ("rollout.dtype=int8",), patch="correction_off"),
    Planted("bounds too tight", frozenset({"rejected"}), "token_k1 in 0.999–1.001, engine in bf16",
            (f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=0.999_1.001", f"{RC}dialect=verl",
             "rollout.dtype=bf16")),
    Planted("bypass with epochs", frozenset({"bypass-repeats"}), "bypass mode, 4 passes over a batch",
            (f"{RC}bypass_mode=true", "actor.ppo_epochs=4")),
    Planted("all wrong", frozenset({"zero-reward", "zero-spread-groups", "no-gradient"}),
            "no answer is ever right", grader=_NEVER),
    Planted("all right", frozenset({"constant-reward", "no-gradient", "zero-spread-groups"}),
            "every answer is right", grader=_ALWAYS),
    Planted("grader raises", frozenset({"failed-rollouts"}), "an exception for answers not 3 characters long",
            ("reward.max_error_fraction=1.0",), grader=_RAISES),
    Planted("grader hangs", frozenset({"slow-grader"}), "one right answer takes 2 s", grader=_HANGS),
    Planted("gameable grader", frozenset({"reward-hacking"}), "in training, the digit 1 is rewarded",
            ("actor.lr=1e-3",), grader=_GAMEABLE),
    Planted("length pays", frozenset({"reward-hacking"}),
            "in training, characters are rewarded", grader=_LONGER),
    Planted("short limit", frozenset({"truncated"}), "the same, and at most 4 tokens",
            ("data.max_response_length=4",), grader=_LONGER),
    Planted("rate too high", frozenset({"large-updates", "reward-fell"}), "rate 2e-2", ("actor.lr=2e-2",)),
    Planted("entropy collapse", frozenset({"entropy"}),
            "rewards are noise, and the loss pays for low entropy", grader=_NOISE,
            patch="low_entropy_pays"),
    Planted("drift from reference", frozenset({"reference-drift"}), "KL coefficient 1e-5, rate 4e-3",
            ("actor.use_kl_loss=true", "actor.kl_loss_coef=1e-5", "actor.lr=4e-3",
             "trainer.total_training_steps=100")),
)  # fmt: skip

HEALTHY = (
    Planted("healthy: decoupled, 2 updates", frozenset(), "token weights"),
    Planted("healthy: decoupled, 1 update", frozenset(), "token weights", ONE_UPDATE),
    Planted("healthy: to the top", frozenset(), "learns its task", ("trainer.total_training_steps=160",)),
    Planted("healthy: bf16 engine", frozenset(), "k3 6e-5", ("rollout.dtype=bf16", *ONE_UPDATE)),
    Planted("healthy: int8 engine", frozenset(), "k3 5e-5", ("rollout.dtype=int8", *ONE_UPDATE)),
    Planted("healthy: KL loss", frozenset(), "reference in the loss", ("actor.use_kl_loss=true",)),
    *(
        Planted(f"healthy: {preset}", frozenset(), "preset as shipped", presets=(preset,))
        for preset in ("rloo-seq-is", "grpo-token-is-multi-rs", "ppo-seq-is-token-rs")
    ),
)


def train_all(planted: tuple[Planted, ...], seeds: list[int], directory: Path) -> dict[tuple[str, int], Path]:
    """Trains missing runs, reuses finished ones; returns run directories by name and seed."""
    context = fork_server()
    found = {}
    for seed in seeds:
        for one in planted:
            run_dir = directory / f"{one.name.replace(': ', '-').replace(' ', '-').replace(',', '')}-{seed}"
            found[one.name, seed] = run_dir
            if (run_dir / "done").exists():
                continue
            shutil.rmtree(run_dir, ignore_errors=True)
            run_dir.mkdir(parents=True)
            process = context.Process(target=_train, args=(one, seed, run_dir))
            process.start()
            process.join()
            error = (run_dir / "error").read_text() if (run_dir / "error").exists() else ""
            if process.exitcode:
                raise SystemExit(f"{one.name}, seed {seed}: exit code {process.exitcode}; see {run_dir}/log")
            print(f"{one.name}, seed {seed}: trained {error}", file=sys.stderr, flush=True)
            (run_dir / "done").touch()
    return found


def _train(one: Planted, seed: int, run_dir: Path) -> None:
    import torch

    from rlctl.errors import RlctlError
    from rlctl.run_spec.load import RUN_SPEC_FILE, dump_spec, load_spec
    from rlctl.train.start import run_rank

    torch.set_num_threads(1)
    log = os.open(run_dir / "log", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    graded: tuple[str, ...] = ()
    if one.grader:
        (run_dir / "grader.py").write_text(one.grader)
        graded = (f"reward.name={run_dir / 'grader.py'}:score",)
    own = _AS_SHIPPED if one.presets else (*_COMMON, *DECOUPLED)
    presets = list(one.presets or ("grpo-uncorrected",))
    overrides = [*own, *one.overrides, *graded, f"trainer.seed={seed}"]
    spec = load_spec(presets, [], overrides).spec
    if one.patch:
        PATCHES[one.patch]()
    text = dump_spec(spec)
    (run_dir / RUN_SPEC_FILE).write_text(text)
    try:
        run_rank(text, str(run_dir), False)
    except RlctlError as error:  # a run that the trainer stopped is also a result
        (run_dir / "error").write_text(str(error))


# --- faults that no spec setting can cause -----------------------------------------------------


def never_synced() -> None:
    """The rollout engine receives weights and ignores them."""
    from rlctl.rollout.hf import HFRollout

    def sync_weights(self: Any, policy: Any, policy_version: int) -> None:
        for _ in policy.weights():
            pass
        self._policy_version = policy_version

    HFRollout.sync_weights = sync_weights


def hotter() -> None:
    """The engine divides its logits by an additional factor of 1.5 and reports the resulting log-probs."""
    from transformers import TemperatureLogitsWarper

    from rlctl.rollout import hf

    told = hf.processors

    def processors(sampling: Any, sampler: Any) -> Any:
        chain = told(sampling, sampler)
        if not sampling.greedy:
            chain.insert(0, TemperatureLogitsWarper(1.5))
        return chain

    hf.processors = processors


def raw_log_probs() -> None:
    """The engine reports the log-probs of its logits before temperature."""
    _record(lambda scores, temperature: scores * temperature)


def hidden_temperature() -> None:
    """The engine samples at a higher temperature than its reported log-probs have."""
    from rlctl.rollout import hf

    honest = hf.draw
    hf.draw = lambda log_probs, uniforms: honest((log_probs / 1.5).log_softmax(-1), uniforms)


def _record(change: Callable[[Any, float], Any]) -> None:
    """Records the log-probs of changed logits; sampling is unchanged."""
    from rlctl.rollout import hf
    from rlctl.rollout.hf import RecordingSampler

    class Recording(RecordingSampler):
        temperature = 1.0

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            reported = change(scores.float(), self.temperature).log_softmax(dim=-1)
            forced = super().__call__(input_ids, scores)
            position = self.num_steps - 1
            chosen = forced.argmax(dim=-1, keepdim=True)
            self.log_probs[self.rows, position] = reported.gather(1, chosen).squeeze(1)
            return forced

    told = hf.processors

    def processors(sampling: Any, sampler: Any) -> Any:
        sampler.temperature = sampling.temperature
        return told(sampling, sampler)

    hf.RecordingSampler, hf.processors = Recording, processors


def shifted() -> None:
    """Log-probs shifted by one token."""
    _report(lambda log_probs: log_probs.roll(1))


def missing() -> None:
    """Log-probs are all 0, as if none had been requested from the engine."""
    _report(lambda log_probs: log_probs * 0.0)


def _report(change: Callable[[Any], Any]) -> None:
    """Changes the log-probs (t,) that the engine reports for a turn."""
    from dataclasses import replace

    from rlctl.rollout.hf import HFRollout

    honest = HFRollout.sample

    def sample(self: Any, requests: Any, sampling: Any) -> Any:
        turns = honest(self, requests, sampling)
        return [replace(turn, log_probs=change(turn.log_probs)) for turn in turns]

    HFRollout.sample = sample


def four_bits() -> None:
    """Rounds weights to 15 levels instead of 255."""
    import torch

    from rlctl.rollout import hf

    @torch.no_grad()
    def rounded(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                step = module.weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 7
                module.weight.copy_((module.weight / step).round() * step)

    hf._round_to_int8 = rounded


def noisy() -> None:
    """Adds noise to every forward pass of the trainer's policy, as dropout or expert routing does."""
    import torch

    from rlctl.engine.policy_engine import PolicyEngine

    honest = PolicyEngine.policy

    def policy(*args: Any, **asked: Any) -> Any:
        output = honest(*args, **asked)
        return output._replace(log_probs=output.log_probs + 0.05 * torch.randn_like(output.log_probs))

    PolicyEngine.policy = policy


def correction_off() -> None:
    """Weights and their metrics are those of equal policies; only the gap metrics are real."""
    from dataclasses import replace

    from rlctl.train import mini_batch

    honest = mini_batch.correct

    def correct(log_probs: Any, rollout_log_probs: Any, *others: Any, **named: Any) -> Any:
        real = honest(log_probs, rollout_log_probs, *others, **named)
        fake = honest(log_probs, log_probs, *others, **named)
        own = {name: value for name, value in fake.sums.items() if name.startswith(("raw.", "weight."))}
        return replace(fake, sums=real.sums | own)

    mini_batch.correct = correct


def low_entropy_pays() -> None:
    """The entropy bonus has the wrong sign."""
    import torch

    from rlctl.engine.policy_engine import PolicyEngine
    from rlctl.train.capability import capabilities_of
    from rlctl.train.settings import UpdateSettings

    read, honest = UpdateSettings.of, PolicyEngine.policy

    def policy(*args: Any, **asked: Any) -> Any:
        return honest(*args, **asked | {"entropy_grad": torch.is_grad_enabled()})

    PolicyEngine.policy = policy

    def wrong(spec: Any, capabilities: Any) -> UpdateSettings:
        actor = spec.actor.model_copy(update={"entropy_coeff": -2.0})
        return read(spec, capabilities_of(spec.model_copy(update={"actor": actor})))

    UpdateSettings.of = staticmethod(wrong)


PATCHES: dict[str, Callable[[], None]] = {
    patch.__name__: patch
    for patch in (
        *(never_synced, hotter, raw_log_probs, hidden_temperature, shifted, missing, noisy),
        *(four_bits, correction_off, low_entropy_pays),
    )
}
