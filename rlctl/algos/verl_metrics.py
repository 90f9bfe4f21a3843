"""verl 0.9's formulas for the metric names that both frameworks log (`WeightRule.metrics = "verl"`).

They differ from the default formulas in three ways: metrics describe weights after the bound but before
rejection and normalisation; they are taken over tokens at every level, so that a sequence counts by its
length; and the standard deviation of a criterion is that of its statistic clamped to the bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.algos.segments import HostSums, Moments, Sums, moments

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.rules import RejectRule


def criterion_sums(name: str, values: Tensor, lengths: Tensor | None, rule: RejectRule) -> Sums:
    """Sums over tokens of a statistic (K,), as it is and clamped to the bounds.

    Args:
        lengths: (K,) tokens for which each value counts; None: values are per token.
    """
    clamped = values.double().clamp(0.0 if rule.lower is None else rule.lower, rule.upper)
    return moments(f"{name}.verl", values, lengths) | moments(f"{name}.verl_clamped", clamped, lengths)


def criterion_moments(sums: HostSums, name: str) -> tuple[float, float]:
    """Mean of the statistic over tokens, and standard deviation of the clamped statistic."""
    return Moments.read(sums, f"{name}.verl").mean, Moments.read(sums, f"{name}.verl_clamped").std


def weight_metrics(token: Moments, raw: Moments | None) -> HostSums:
    """Metrics of weights that replace the default ones; extremes of sequences: before the bound.

    Args:
        token: of the bounded weights, over tokens.
        raw: of the sequences' weights before the bound; None at token level.
    """
    metrics = {"mean": token.mean, "std": token.std, "eff_sample_size": token.ess}
    return metrics | ({"max": raw.max, "min": raw.min} if raw else {})
