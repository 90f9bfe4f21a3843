"""Logs of runs that never happened: healthy rows, made as rough as real logs are.

A row is what one step logged, under rlctl's names (`rlctl.metric_names`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import numpy as np

Row = dict[str, Any]

CORR = "rollout_corr/"
#: Validated every so many steps.
VAL_EVERY = 5
#: Metrics whose noise drifts and jumps in real logs.
_ROUGH = (
    "actor/grad_norm",
    "actor/entropy",
    "response_length/mean",
    "timing_s/step",
    f"{CORR}k3_kl",
    f"{CORR}chi2_token",
    f"{CORR}chi2_seq",
    f"{CORR}rollout_is_std",
    "training/rollout_probs_diff_mean",
    "reward/zero_spread_groups",
    "response_length/clip_ratio",
)


def healthy_rows(count: int = 60, seed: int = 0) -> list[Row]:
    """A learning run: reward rises, entropy falls with it, the policies are close."""
    noise = random.Random(seed)

    def near(value: float, spread: float) -> float:
        return value * math.exp(noise.gauss(0, spread))

    return [
        {
            "step": step,
            "timestamp": "2025-01-31T12:00:00.123+00:00",
            "critic/score/mean": 0.3 + 0.4 * step / count + noise.gauss(0, 0.02),
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            "reward/zero_spread_groups": near(0.2, 0.2),
            "reward/error_fraction": 0.0,
            "response_length/mean": (length := near(300, 0.05)),
            "response_length/min": 0.98 * length,
            "response_length/max": 1.02 * length,
            "response_length/clip_ratio": near(0.01, 0.3),
            "timing_s/reward": near(1.0, 0.2),
            "timing_s/step": near(20.0, 0.1),
            "training/staleness_max": 0.0,
            "training/rollout_probs_diff_mean": near(1e-3, 0.2),
            f"{CORR}kl": noise.gauss(0, 1e-3),
            f"{CORR}k3_kl": near(3e-4, 0.3),
            f"{CORR}chi2_token": near(1e-3, 0.3),
            f"{CORR}chi2_seq": near(0.1, 0.3),
            f"{CORR}saturated_sequences": 0.0,
            f"{CORR}rollout_rs_masked_fraction": near(0.01, 0.3),
            f"{CORR}rollout_is_raw_mean": near(1.0, 0.02),
            f"{CORR}rollout_is_raw_eff_sample_size": 1 - near(0.05, 0.3),
            f"{CORR}rollout_is_mean": 1.0,
            f"{CORR}rollout_is_std": near(0.1, 0.3),
            f"{CORR}rollout_is_min": near(0.6, 0.1),
            f"{CORR}rollout_is_max": near(1.8, 0.05),
            f"{CORR}rollout_is_eff_sample_size": 1 - near(0.03, 0.3),
            f"{CORR}rollout_is_ratio_fraction_high": near(0.01, 0.3),
            "actor/pg_loss": noise.gauss(-0.05, 0.01),
            "actor/pg_clipfrac": near(0.005, 0.3),
            "actor/ppo_kl": noise.gauss(0, 1e-3),
            "actor/entropy": (entropy := near(0.6 - 0.2 * step / count, 0.03)),
            f"{CORR}training_log_ppl": (log_ppl := entropy * near(1.0, 0.05)),
            f"{CORR}rollout_log_ppl": log_ppl + noise.gauss(0, 1e-3),
            "actor/grad_norm": near(0.8, 0.15),
            "actor/lr": 1e-5,
            **({"val/addition/reward_mean": 0.3 + 0.4 * step / count} if step % VAL_EVERY == 0 else {}),
        }
        for step in range(1, count + 1)
    ]


def roughen(rows: list[Row], seed: int, *, drift: float = 0.03, jumps: float = 0.05) -> None:
    """Multiply what wanders in real logs by noise that is autocorrelated and heavy-tailed.

    Args:
        rows: changed in place.
        seed: of the noise.
        drift: innovation of the AR(1) process with coefficient 0.9, in logarithms.
        jumps: scale of the independent part, Student's t with 4 degrees of freedom, in logarithms.
    """
    noise = np.random.default_rng(seed)
    for key in _ROUGH:
        wander = 0.0
        for row in rows:
            wander = 0.9 * wander + noise.normal(0, drift)
            factor = math.exp(wander + jumps * noise.standard_t(4))
            if key in row:
                row[key] *= factor


def settle(rows: Iterable[Row]) -> None:
    """Clip shares to [0, 1] after noise is added."""
    for row in rows:
        for key in ("reward/zero_spread_groups", "response_length/clip_ratio"):
            if key in row:
                row[key] = min(1.0, max(0.0, row[key]))


def interrupted(rows: list[Row], seed: int) -> list[Row]:
    """The same log after a restart that went back six steps, and with three rows that were lost.

    The first attempt at the repeated steps differs from the second, which is the one that counts.
    """
    noise = random.Random(seed)
    at = noise.randrange(len(rows) // 3, len(rows) - 8)
    attempt = [
        {**earlier, "step": row["step"]} for earlier, row in zip(rows[at - 6 : at], rows[at:], strict=False)
    ]
    lost = set(noise.sample(range(20, len(rows) - 1), 3))
    before, after = ([row for place, row in part if place not in lost] for part in _parts(rows, at))
    return [*before, *attempt, *after]


def _parts(rows: list[Row], at: int) -> tuple[list[tuple[int, Row]], list[tuple[int, Row]]]:
    places = list(enumerate(rows))
    return places[:at], places[at:]
