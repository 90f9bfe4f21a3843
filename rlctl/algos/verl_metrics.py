"""The metric convention `verl`: verl 0.9's formulas for the metric names that both frameworks log.

They differ from the default formulas in three ways: metrics describe weights after the bound but before
rejection and normalisation; they are taken over tokens at every level, so that a sequence counts by its
length; and the standard deviation of a criterion is that of its statistic clamped to the bounds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlctl.algos.metric_sums import ratio
from rlctl.registry import METRIC_CONVENTIONS

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.correction_records import CorrectionSums, CriterionSums
    from rlctl.algos.rules import RejectRule, WeightRule


@METRIC_CONVENTIONS.register("verl", label="verl 0.9's metrics")
class VerlMetrics:
    """A `rlctl.algos.statistics.MetricConvention`."""

    def clamped_rows(
        self, values: Tensor, response: Tensor, length: Tensor, rule: RejectRule
    ) -> tuple[Tensor, Tensor]:
        """(B,) Σx and Σx² per sequence over its tokens, x being the statistic clamped to the bounds.

        Args:
            values: (B, T), or (B, 1) for a reduced statistic, which counts once per token (`length`, (B,)).
            response: (B, T) float32, 1 on response tokens, else 0.
        """
        clamped = values.clamp(0.0 if rule.lower is None else rule.lower, rule.upper)
        if rule.reduction != "none":
            return clamped[:, 0] * length, clamped[:, 0].square() * length
        clamped = clamped.double().mul_(response)
        return clamped.sum(-1), clamped.square_().sum(-1)

    def criterion_moments(self, sums: CriterionSums[float], tokens: float) -> tuple[float, float]:
        """Mean of the statistic over tokens, and standard deviation of the clamped statistic."""
        clamped, squares = ratio(sums.clamped, tokens), ratio(sums.clamped_squares, tokens)
        return ratio(sums.token_total, tokens), math.sqrt(max(squares - clamped**2, 0.0))

    def weight_metrics(self, sums: CorrectionSums[float], rule: WeightRule) -> dict[str, float]:
        """`rollout_is_*` metrics; extremes of sequence weights are those before the bound."""
        if sums.weights is None:
            return {}
        token = sums.weights.described.token
        found = {
            "rollout_is_mean": token.mean,
            "rollout_is_std": token.std,
            "rollout_is_eff_sample_size": token.ess,
        }
        if not rule.by_token:
            raw = sums.raw.sequence
            found |= {"rollout_is_max": raw.max, "rollout_is_min": raw.min}
        return found
