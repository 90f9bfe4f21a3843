"""Kinds of healthy runs, on which no rule may say more than a remark."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulated_logs.faults import (
    DECOUPLED,
    GAE,
    ONE_UPDATE,
    PPO,
    REJECTING,
    STEPS,
    STILL,
    TOKEN,
    TOOLS,
    Value,
    change,
    exactly,
    near,
    num_turns,
    ramp,
    validated,
)
from tests.simulated_logs.simulate import CORR, Row


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of healthy run.

    Attributes:
        name: for the table.
        overrides: of its spec.
        values: metric → what it is, where it differs from a run that learns at a steady pace.
        steps: its length.
        roughness: factor on the noise.
    """

    name: str
    overrides: tuple[str, ...] = ()
    values: Mapping[str, Value] = field(default_factory=dict)
    steps: int = STEPS
    roughness: float = 1.0

    def apply(self, rows: list[Row], seed: int) -> None:
        """Make plain healthy rows such a run's."""
        change(rows, self.values, random.Random(seed))


#: Of samples that are the policy's own both are near its entropy.
_LOG_PPL = (f"{CORR}training_log_ppl", f"{CORR}rollout_log_ppl")


def _saturating(top: float) -> Value:
    """Rises for 60 % of the run, then stays."""

    def value(since: int, length: int, noise: random.Random, healthy: Any) -> float:
        return min(top, 0.2 + (top - 0.2) * since / (0.6 * length)) + noise.gauss(0, 0.005)

    return value


def _alternating(high: float, low: float, steps: int) -> Value:
    """At one level for so many steps, then at the other: data ordered in blocks of two sources."""

    def value(since: int, length: int, noise: random.Random, healthy: Any) -> float:
        return (low if since // steps % 2 else high) * math.exp(noise.gauss(0, 0.03))

    return value


def _either(high: float, low: float) -> Value:
    """At one level or the other, at random: each batch is of one of two sources."""
    return lambda since, length, noise, healthy: noise.choice((high, low)) * math.exp(noise.gauss(0, 0.03))


_GAP = {"training/rollout_probs_diff_mean": near(7e-3, 0.05), f"{CORR}k3_kl": near(2e-3, 0.1)}

KINDS: tuple[Kind, ...] = (
    Kind("bypass, two updates"),
    Kind("on-policy, one update", (ONE_UPDATE, PPO, DECOUPLED), STILL),
    Kind("decoupled, rejection", (DECOUPLED, *REJECTING)),
    Kind("critic and KL in the loss", (GAE, "actor.use_kl_loss=true"),
         {"critic/vf_explained_var": ramp(0.05, 0.6), "actor/kl_loss": ramp(0.001, 0.15)}),
    Kind("long reasoning", (DECOUPLED, TOKEN),
         {"response_length/mean": ramp(500, 3000), "actor/grad_norm": near(0.15, 0.1), **_GAP}),
    Kind("learned to the top", (),
         {"critic/score/mean": _saturating(0.98),
          **dict.fromkeys(("actor/entropy", *_LOG_PPL), ramp(0.6, 0.004)),
          "reward/zero_spread_groups": ramp(0.1, 0.97)}),
    Kind("learns nothing yet", (),
         {"critic/score/mean": near(0.4, 0.05), "val/addition/reward_mean": validated(0.4),
          "actor/entropy": near(0.5, 0.05)}),
    Kind("asynchronous, 4 batches", ("rollout.staleness=4", TOKEN),
         {"training/staleness_max": exactly(8.0), f"{CORR}kl": near(0.01), f"{CORR}k3_kl": near(0.01),
          f"{CORR}chi2_token": near(0.05), f"{CORR}rollout_is_eff_sample_size": near(0.9, 0.02),
          f"{CORR}rollout_is_raw_eff_sample_size": near(0.85, 0.02)}),
    Kind("coarse engine from the start", (ONE_UPDATE, TOKEN), {**STILL, **_GAP}),
    Kind("tools", (), TOOLS),
    Kind("learns a tool's format", (),
         {**TOOLS, "episode/tool_error_fraction": ramp(0.9, 0.05), "episode/tool_errors": ramp(1.8, 0.1),
          "episode/stop/max_turns": ramp(0.95, 0.2)}),
    Kind("learns to answer at once", (),
         {**TOOLS, **num_turns(ramp(2.0, 1.0, 0.0)), "episode/tool_errors": ramp(0.1, 0.0),
          "critic/score/mean": ramp(0.3, 0.97)}),
    Kind("stale samples of episodes", ("rollout.staleness=4", TOKEN),
         {**TOOLS, "training/staleness_max": exactly(8.0), f"{CORR}kl": near(0.08),
          f"{CORR}k3_kl": near(0.08), f"{CORR}chi2_token": near(0.2),
          f"{CORR}rollout_is_eff_sample_size": near(0.85, 0.02),
          f"{CORR}rollout_is_raw_eff_sample_size": near(0.8, 0.02)}),
    Kind("two sources, in blocks of 10", (),
         {"critic/score/mean": _alternating(0.7, 0.3, 10), "response_length/mean": _alternating(300, 500, 10),
          "val/addition/reward_mean": validated(0.5),
          **dict.fromkeys(("actor/entropy", *_LOG_PPL), _alternating(0.5, 0.8, 10))}),
    Kind("two sources, in blocks of 25", (),
         {"critic/score/mean": _alternating(0.66, 0.34, 25), "val/addition/reward_mean": validated(0.5)}),
    Kind("two sources, at random", (),
         {"critic/score/mean": _either(0.7, 0.3), "response_length/mean": _either(300, 500),
          "val/addition/reward_mean": validated(0.5)}),
    Kind("rough: drifting, heavy tails", (), roughness=2.0),
    Kind("short: 30 steps", (), steps=30),
)  # fmt: skip
