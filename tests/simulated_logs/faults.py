"""What every rule is for, planted into simulated logs: mildly and severely."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl.diagnose.finding import Severity
from tests.simulated_logs.simulate import CORR, Row
from tests.simulated_logs.writers import Format

STEPS = 100
#: The first 40 steps of most faulty runs are healthy: rules compare with a run's own start.
ONSET = 41

#: (steps since the onset, steps from there to the end, noise, the healthy value) → what is logged instead;
#: None: nothing.
Value = Callable[[int, int, random.Random, Any], Any]
Degree = Literal["mild", "severe"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and the finding that is expected for it.

    Attributes:
        rule: that is for it.
        degree: how wrong.
        severity: that the finding must reach in rlctl's own log.
        changes: metric → what it becomes from the onset on.
        formats: whose logs show it; in others the rule must be skipped.
        elsewhere: severity in others' logs, where they say less; None: the same.
        overrides: of the run's spec.
        onset, until: first and last step that is changed.
        before: metric → what it is in the whole run, changes aside.
    """

    rule: str
    degree: Degree
    severity: Severity
    changes: Mapping[str, Value]
    formats: tuple[Format, ...]
    elsewhere: Severity | None = None
    overrides: tuple[str, ...] = ()
    onset: int = ONSET
    until: int = STEPS
    before: Mapping[str, Value] = field(default_factory=dict)

    def expected(self, form: Format) -> Severity:
        """The severity that a finding in this framework's log must reach."""
        return self.severity if form == "rlctl" or self.elsewhere is None else self.elsewhere

    def plant(self, rows: list[Row], seed: int) -> None:
        """Spoil healthy rows."""
        noise = random.Random(seed)
        change(rows, self.before, noise)
        change(rows, self.changes, noise, self.onset, self.until)


def change(
    rows: list[Row],
    values: Mapping[str, Value],
    noise: random.Random,
    onset: int = 1,
    until: int = STEPS,
) -> None:
    """Set metrics in the rows of these steps."""
    for row in rows:
        if not onset <= row["step"] <= until:
            continue
        for key, value in values.items():
            new = value(row["step"] - onset, len(rows) - onset, noise, row.get(key))
            row[key] = new
            if new is None:
                del row[key]


def near(value: float, spread: float = 0.08) -> Value:
    """This, with some noise."""
    return lambda since, length, noise, healthy: value * math.exp(noise.gauss(0, spread))


def ramp(start: float, end: float, spread: float = 0.03) -> Value:
    """From here to there."""

    def value(since: int, length: int, noise: random.Random, healthy: Any) -> float:
        return (start + (end - start) * since / length) * math.exp(noise.gauss(0, spread))

    return value


def now_and_then(value: Any, every: int, how_many: int = 1) -> Value:
    """This on `how_many` of `every` steps, and what is healthy on the others."""
    return lambda since, length, noise, healthy: value if since % every < how_many else healthy


def exactly(value: Any) -> Value:
    """This, without noise; None: not logged."""
    return lambda since, length, noise, healthy: value


def validated(value: float) -> Value:
    """A validation score that stays, where one is logged."""
    return lambda since, length, noise, healthy: None if healthy is None else value + noise.gauss(0, 0.005)


def _sign(size: float) -> Value:
    return lambda since, length, noise, healthy: size * noise.choice((-1, 1))


def _log_ppl(nats: float) -> Mapping[str, Value]:
    """Samples of this mean −log π, on which both sides agree."""
    return {f"{CORR}{side}_log_ppl": near(nats, 0.02) for side in ("training", "rollout")}


RC = "algorithm.rollout_correction."
ONE_UPDATE = "actor.ppo_mini_batch_size=null"
DECOUPLED, PPO = f"{RC}bypass_mode=false", f"{RC}loss_type=ppo_clip"
REJECTING = (f"{RC}rollout_rs=token_k1", f"{RC}rollout_rs_threshold=0.6_1.6")
GAE, TOKEN = "algorithm.adv_estimator=gae", f"{RC}rollout_is=token"

_SCORE, _VAL, _BEST = "critic/score/mean", "val/addition/reward_mean", "critic/score/max"
_NORM, _ENTROPY, _LENGTH = "actor/grad_norm", "actor/entropy", "response_length/mean"
_PROBS, _ERROR = "training/rollout_probs_diff_mean", "mismatch/token_mult_prob_error"
_LOG_GAP, _K3, _KL = "mismatch/log_prob_abs_diff_mean", f"{CORR}k3_kl", f"{CORR}kl"
_MASKED, _SPREAD = f"{CORR}rollout_rs_masked_fraction", "reward/zero_spread_groups"
_WEIGHT, _RAW_ESS = f"{CORR}rollout_is_", f"{CORR}rollout_is_raw_eff_sample_size"

_OURS_VERLS: tuple[Format, ...] = ("rlctl", "verl")
_ALL: tuple[Format, ...] = ("rlctl", "verl", "trl")
#: A policy that has not moved, with one update per batch.
STILL = {"actor/ppo_kl": exactly(0.0), "actor/pg_clipfrac": exactly(0.0)}
_FLAT = {_SCORE: near(0.3, 0.05), _VAL: validated(0.3)}
_NOTHING = {_SCORE: exactly(0.0), _BEST: exactly(0.0)}
_IDLE: Mapping[str, Value] = {
    f"{_WEIGHT}min": exactly(1.0),
    f"{_WEIGHT}max": exactly(1.0),
    f"{_WEIGHT}std": exactly(0.0),
    _MASKED: exactly(0.0),
}
_UNLOGGED = {f"{_WEIGHT}{which}": exactly(None) for which in ("mean", "min", "max", "std")}


def num_turns(value: Value) -> Mapping[str, Value]:
    """Turns per episode, and what follows from them: a call of a tool after each but the last."""

    def of(scale: float, shift: float) -> Value:
        return lambda *given: scale * value(*given) + shift

    return {
        "episode/num_turns/mean": value,
        "episode/num_messages/mean": of(2.0, 0.0),
        "episode/num_tool_calls": of(1.0, -1.0),
    }


def _tool_errors(share: Value) -> Mapping[str, Value]:
    """This share of two calls fails."""
    return {
        "episode/tool_error_fraction": share,
        "episode/tool_errors": lambda *given: 2.0 * share(*given),
    }


_AT_MAX = "episode/stop/max_turns"
#: Episodes of three turns with two calls of tools.
TOOLS: Mapping[str, Value] = {
    **num_turns(exactly(3.0)),
    **_tool_errors(near(0.1)),
    _AT_MAX: near(0.3),
    **{
        f"episode/stop/{reason}": exactly(0.0) for reason in ("max_tool_calls", "context_overflow", "timeout")
    },
    "episode/observation_fraction": near(0.3),
    "episode/seconds/policy": near(2.0),
    "episode/seconds/waiting": near(0.5),
    "episode/seconds/environment": near(0.8),
}


def _in_loss(share: float, nats: float = 3.0) -> Mapping[str, Value]:
    """This share of the tokens was not sampled: log-probs 0 of the engine, −`nats` of the trainer."""
    gap, kept = near(share * nats, 0.02), math.exp(-nats)
    return {
        _KL: gap,
        _K3: lambda *given: gap(*given) - share * (1.0 - kept),
        _LOG_GAP: gap,
        f"{_WEIGHT}mean": near(1.0 - share * (1.0 - kept), 0.005),
    }


def _both(
    rule: str,
    mild: tuple[Severity, Mapping[str, Value]],
    severe: tuple[Severity, Mapping[str, Value]],
    formats: tuple[Format, ...] = _OURS_VERLS,
    **others: Any,
) -> tuple[Fault, Fault]:
    return (
        Fault(rule, "mild", *mild, formats, **others),
        Fault(rule, "severe", *severe, formats, **others),
    )


_GAP = (
    *_both("probability-gap", ("warning", {_PROBS: near(0.008)}), ("critical", {_PROBS: near(0.03)}),
           overrides=(ONE_UPDATE,)),
    *_both("policy-gap", ("warning", {_K3: near(0.005), _LOG_GAP: near(0.06)}),
           ("critical", {_KL: near(0.25), _K3: near(0.3), _LOG_GAP: near(0.4)}), _ALL,
           overrides=(ONE_UPDATE,), before={_LOG_GAP: near(0.01)}),
    *_both("ratio-parts", ("info", {f"{CORR}split/staleness": near(0.05), f"{CORR}split/engine": near(1e-4)}),
           ("info", {f"{CORR}split/staleness": near(0.5), f"{CORR}split/engine": near(1e-4)}), ("rlctl",)),
    *_both("sampled-otherwise", ("warning", _log_ppl(0.9)), ("critical", _log_ppl(1.6))),
    *_both("cut-vocabulary",
           ("warning", {f"{CORR}unit_mean_cut": exactly(1.0), f"{CORR}unit_mean": near(0.98)}),
           ("warning", {f"{CORR}unit_mean_cut": exactly(1.0), f"{CORR}unit_mean": near(0.8)}), ("rlctl",)),
    *_both("token-error", ("warning", {_ERROR: near(1.12, 0.01)}), ("critical", {_ERROR: near(2.5)}),
           ("nemo-rl",), before={_ERROR: near(1.01, 0.002)}),
    *_both("stale-weights", ("critical", {f"{_WEIGHT}mean": near(0.07), _LOG_GAP: near(1.3)}),
           ("critical", {f"{_WEIGHT}mean": near(0.02), _LOG_GAP: near(4.0)}), _ALL, overrides=(TOKEN,),
           before={_LOG_GAP: near(0.01)}),
)  # fmt: skip
_WEIGHTS = (
    *_both("weight-mean", ("info", {f"{_WEIGHT}raw_mean": near(1.4, 0.03), f"{_WEIGHT}mean": near(0.42)}),
           ("critical", {f"{_WEIGHT}raw_mean": near(0.3), f"{_WEIGHT}mean": near(0.3)}), _ALL,
           elsewhere="warning"),
    *_both("effective-samples",
           ("warning", {f"{_WEIGHT}eff_sample_size": near(0.4), f"{_WEIGHT}std": near(1.2)}),
           ("critical", {f"{_WEIGHT}eff_sample_size": near(0.15)})),
    *_both("hidden-tail", ("warning", {_RAW_ESS: near(0.2), f"{CORR}chi2_seq": near(5.0)}),
           ("warning", {_RAW_ESS: near(0.03), f"{CORR}chi2_seq": near(60.0)})),
    *_both("usable-length", ("info", {f"{CORR}chi2_token": near(0.02)}),
           ("info", {f"{CORR}chi2_token": near(0.3)}), onset=1),
)  # fmt: skip
_REJECTION = (
    *_both("rejected", ("info", {_MASKED: near(0.4)}), ("critical", {_MASKED: near(0.75)}),
           overrides=REJECTING),
    *_both("silently-off", ("critical", _IDLE), ("critical", _UNLOGGED), onset=1),
    Fault("bypass-repeats", "mild", "warning", {}, _OURS_VERLS, None, ("actor.ppo_epochs=2",), 1),
    Fault("bypass-repeats", "severe", "warning", {}, _OURS_VERLS, None, ("actor.ppo_epochs=8",), 1),
)  # fmt: skip
_UPDATE = (
    *_both("not-finite", ("warning", {_NORM: now_and_then(math.nan, 20)}),
           ("critical", {_NORM: now_and_then(math.nan, 3)}), _ALL),
    *_both("gradient-norm", ("warning", {_NORM: now_and_then(20.0, 12)}), ("warning", {_NORM: near(40.0)}),
           _ALL),
    *_both("no-gradient", ("critical", {_NORM: now_and_then(0.0, 2)}), ("critical", {_NORM: exactly(0.0)}),
           _ALL, onset=1),
    *_both("reference-drift", ("warning", {"actor/kl_loss": near(0.8)}),
           ("critical", {"actor/kl_loss": near(5.0)}), _ALL, overrides=("actor.use_kl_loss=true",),
           before={"actor/kl_loss": near(0.05)}),
    *_both("healthy-loss", ("info", {"actor/pg_loss": _sign(3e-3)}), ("info", {"actor/pg_loss": _sign(1e-4)}),
           _ALL, overrides=(PPO,), onset=1, before=STILL),
)  # fmt: skip
_REWARD = (
    *_both("zero-spread-groups", ("warning", {_SPREAD: near(0.62)}),
           ("critical", {_SPREAD: near(0.92, 0.02)}), ("rlctl", "trl"), elsewhere="warning", before=_FLAT),
    *_both("reward-fell", ("warning", {_SCORE: near(0.3, 0.05)}), ("critical", {_SCORE: near(0.02, 0.3)}),
           _ALL, before={_SCORE: near(0.5, 0.05)}),
    Fault("zero-reward", "mild", "critical", _NOTHING, _ALL, until=ONSET + 27),
    Fault("zero-reward", "severe", "critical", _NOTHING, _ALL, onset=1),
    Fault("entropy", "mild", "warning", {_ENTROPY: ramp(0.8, 0.2)}, _ALL, onset=1, before=_FLAT),
    Fault("entropy", "severe", "warning", {_ENTROPY: near(1e-3)}, _ALL, before=_FLAT),
    *_both("reward-hacking", ("warning", {_SCORE: ramp(0.3, 0.55)}), ("critical", {_SCORE: ramp(0.3, 0.9)}),
           _ALL, onset=1, before=_FLAT),
    *_both("truncated", ("warning", {"response_length/clip_ratio": near(0.16)}),
           ("critical", {"response_length/clip_ratio": near(0.5)}), _ALL),
)  # fmt: skip
_SAMPLES = (
    *_both("staleness", ("warning", {"training/staleness_max": near(24.0, 0.02)}),
           ("warning", {"training/staleness_max": near(80.0, 0.02)}), _ALL),
    *_both("nondeterminism", ("warning", {"actor/ppo_kl": near(0.004)}),
           ("warning", {"actor/ppo_kl": near(0.05)}), overrides=(ONE_UPDATE, DECOUPLED), before=STILL),
    *_both("slow-grader", ("warning", {"timing_s/reward": now_and_then(12.0, 8)}),
           ("warning", {"timing_s/reward": now_and_then(60.0, 4), "timing_s/step": now_and_then(80.0, 4)}),
           onset=1),
    *_both("failed-rollouts", ("warning", {"reward/error_fraction": near(0.1),
                                           "rollout/empty_fraction": near(0.1)}),
           ("critical", {"reward/error_fraction": near(0.4), "rollout/empty_fraction": near(0.4)})),
)  # fmt: skip

_EPISODES = (
    *_both("tool-errors", ("warning", _tool_errors(near(0.3))), ("critical", _tool_errors(near(0.75, 0.02))),
           ("rlctl", "trl"), before=TOOLS),
    *_both("turns-collapsed", ("warning", num_turns(near(1.05, 0.01))),
           ("warning", num_turns(exactly(1.0))), _ALL, before=TOOLS | _FLAT),
    *_both("episodes-at-limit", ("warning", {_AT_MAX: near(0.88, 0.02)}),
           ("warning", {_AT_MAX: exactly(1.0)}), ("rlctl",), before=TOOLS | _FLAT),
    *_both("slow-environment", ("warning", {"episode/seconds/environment": near(3.5)}),
           ("warning", {"episode/seconds/environment": near(30.0)}), before=TOOLS),
    *_both("observation-tokens", ("warning", _in_loss(0.1)), ("critical", _in_loss(0.5)), ("verl", "trl"),
           onset=1, overrides=(TOKEN,), before=TOOLS),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (*_GAP, *_WEIGHTS, *_REJECTION, *_UPDATE, *_REWARD, *_SAMPLES, *_EPISODES)
