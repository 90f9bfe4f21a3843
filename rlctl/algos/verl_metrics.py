"""verl 0.9's formulas behind the names that both log, for `WeightRule.metrics` = `verl`.

They differ from ours in three ways: weights are described after the bound but before rejection and
normalisation; at every level over tokens, so that a sequence counts by its length; and the standard
deviation of a criterion is that of its statistic held within the bounds.
"""

from __future__ import annotations

import math

from torch import Tensor

from rlctl.algos.correction_records import CorrectionSums, CriterionSums
from rlctl.algos.metric_sums import ratio
from rlctl.algos.rules import RejectRule, WeightRule


def apply(rule: WeightRule) -> bool:
    """Whether these formulas are asked for."""
    return rule.metrics == "verl"


def held_rows(values: Tensor, response: Tensor, length: Tensor, rule: RejectRule) -> tuple[Tensor, Tensor]:
    """(B,) Σx and Σx² per sequence over its tokens, x the statistic held within the bounds.

    Args:
        values: (B, T), or for a reduced statistic (B, 1): it counts for each of the `length` (B,) tokens.
        response: (B, T) float32, 1 on response tokens, else 0.
    """
    held = values.clamp(0.0 if rule.lower is None else rule.lower, rule.upper)
    if rule.reduction != "none":
        return held[:, 0] * length, held[:, 0].square() * length
    held = held * response
    return held.sum(-1).double(), held.square().sum(-1).double()


def criterion_moments(sums: CriterionSums[float], tokens: float) -> tuple[float, float]:
    """Mean of the statistic over tokens, and the standard deviation of the held one."""
    held = ratio(sums.held, tokens)
    return ratio(sums.token_total, tokens), math.sqrt(max(ratio(sums.held_squares, tokens) - held**2, 0.0))


def weight_metrics(sums: CorrectionSums[float], rule: WeightRule) -> dict[str, float]:
    """`rollout_is_*` figures that replace ours; extremes of sequence weights are those before the bound."""
    if sums.weights is None:
        return {}
    token = sums.weights.described.token
    found = {
        "rollout_is_mean": token.mean,
        "rollout_is_std": token.std,
        "rollout_is_eff_sample_size": token.ess,
    }
    if rule.level != "token":
        raw = sums.raw.sequence
        found |= {"rollout_is_max": raw.max, "rollout_is_min": raw.min}
    return found
