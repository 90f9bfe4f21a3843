"""What rollout correction measures: sums on the device, metrics on the host.

Ratios are summed as they are and as distances from 1 (expm1): variances near ρ = 1 survive rounding, and
effective sample sizes are right at any magnitude. Tokens add up in float32, all else in float64: first
within each row, then over the rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from rlctl.algos.correction_records import (
    CorrectionSums,
    CriterionResult,
    CriterionSums,
    GapSums,
    LogRatio,
    ProbabilitySums,
    UnitMoments,
    Weights,
    WeightSums,
)
from rlctl.algos.metric_sums import Moments, ratio
from rlctl.algos.row_blocks import as_float, count
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, RejectRule, WeightRule
from rlctl.registry import METRIC_CONVENTIONS


class MetricConvention(Protocol):
    """Other formulas behind the names of weights' and criteria's metrics.

    With one, weights are described after the bound, before rejection and normalisation.
    """

    def held_rows(
        self, values: Tensor, response: Tensor, length: Tensor, rule: RejectRule
    ) -> tuple[Tensor, Tensor]:
        """(B,) Σx and Σx² over a sequence's tokens, x the statistic held within the bounds."""

    def criterion_moments(self, sums: CriterionSums[float], tokens: float) -> tuple[float, float]:
        """Mean and standard deviation of a criterion."""

    def weight_metrics(self, sums: CorrectionSums[float], rule: WeightRule) -> dict[str, float]:
        """`rollout_is_*` figures that replace ours."""


def _convention(rule: WeightRule) -> MetricConvention | None:
    return None if rule.metrics is None else METRIC_CONVENTIONS[rule.metrics]()


# --- on the device: every field is (B,), one number per row -----------------------------------------


def correction_sums(
    log_ratio: LogRatio,
    criteria: list[CriterionResult],
    keep: Tensor,
    weights: Weights | None,
    rules: CorrectionRules,
) -> CorrectionSums[Tensor]:
    """The sums of some rows. Overwrites the log-probs in `log_ratio`."""
    rows = _Rows(log_ratio)
    length, num_kept = log_ratio.length[:, 0], count(keep)[:, 0].double()
    (train,) = rows.clean(log_ratio.train.sum(-1))
    raw = _raw_moments(rows, weights, rules.weight)
    product = log_ratio.sequence[:, 0]
    return CorrectionSums(
        tokens=length,
        sequences=(length > 0).double(),
        finite_tokens=rows.length,
        finite_sequences=rows.is_finite,
        kept_tokens=num_kept,
        kept_sequences=(num_kept > 0).double(),
        rejected_sequences=(num_kept < length).double(),
        saturated=(product.abs() >= LOG_RATIO_CLAMP) * rows.is_finite,
        gap=_gap_sums(rows, train, product),
        raw=raw,
        weights=None if weights is None else _weight_sums(rows, weights, raw, num_kept, rules.weight),
        criteria=tuple(
            _criterion_sums(rows, result, rule, rules.weight)
            for result, rule in zip(criteria, rules.reject, strict=True)
        ),
        probabilities=_probability_sums(rows, log_ratio.train, log_ratio.rollout),
    ).over_rows()


class _Rows:
    """What several statistics share. All are (B,) float64 and 0.0 of rows that are not finite.

    Attributes:
        response: (B, T) float32, 1 on response tokens, else 0: multiplying by it is fast.
        length: response tokens.
        is_finite: 1.0 or 0.0.
        excess, excess_squares: sums of ρ − 1 over tokens.
        clamped: sum of the clamped log ρ.
    """

    def __init__(self, log_ratio: LogRatio) -> None:
        self.log_ratio = log_ratio
        self.response = as_float(log_ratio.mask)
        self.finite = log_ratio.finite[:, 0]
        self.is_finite = self.finite.double()
        self.length = log_ratio.length[:, 0] * self.is_finite
        self.divisor = self.length.clamp(min=1)
        excess = log_ratio.excess
        self.excess, self.excess_squares, self.clamped = self.clean(
            excess.sum(-1), _squares(excess), log_ratio.token.sum(-1)
        )

    @cached_property
    def padding(self) -> Tensor:
        """(B, T) float32: 0 on response tokens, else a number beyond all others."""
        return (1.0 - self.response).mul_(1e38)

    def clean(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Figures (B,) of rows as float64, 0.0 of rows that are not finite."""
        return torch.where(self.finite, torch.stack(values).double(), 0.0).unbind()

    def token_moments(self, values: Tensor, offset: tuple[Tensor, Tensor] | None = None) -> Moments[Tensor]:
        """Of values (B, T), 0.0 on padding; `offset`: the sums of (value − 1) and of its square."""
        extremes = (values + self.padding).amin(-1), (values - self.padding).amax(-1)
        total, squares, low, high = self.clean(values.sum(-1), _squares(values), *extremes)
        n = self.length
        sums = offset or (total - n, squares - 2.0 * total + n)
        return Moments(n, total, squares, *sums, *_extremes(low, high, self.finite))

    @cached_property
    def ratio_moments(self) -> Moments[Tensor]:
        """Of ρ over tokens."""
        excess = self.excess, self.excess_squares
        return self.token_moments(self.log_ratio.ratio * self.response, excess)

    def row_moments(self, values: Tensor, offset: Tensor | None = None) -> Moments[Tensor]:
        """Of one value (B,) per finite row; `offset`: value − 1, where it is known more exactly."""
        return _moments(values, self.is_finite, offset)


def _squares(values: Tensor) -> Tensor:
    """(B,) Σ x² over tokens, exact for ones."""
    return values.square().sum(-1)


def _moments(values: Tensor, n: Tensor, offset: Tensor | None = None) -> Moments[Tensor]:
    """Of values (B,) that count n times each."""
    offset = values - 1.0 if offset is None else offset
    total, distance = values * n, offset * n
    extremes = _extremes(values, values, n > 0)
    return Moments(n, total, total * values, distance, distance * offset, *extremes)


def _extremes(low: Tensor, high: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value and the negated lowest, of some rows."""
    highest, negated_lowest = torch.where(where, torch.stack([high, -low]), -math.inf).unbind()
    return highest, negated_lowest


def _raw_moments(rows: _Rows, weights: Weights | None, rule: WeightRule) -> UnitMoments[Tensor]:
    """Of the weights before bound, rejection and normalisation; of ρ_t without a level."""
    if weights is None or weights.log is rows.log_ratio.token:
        token, excess = rows.ratio_moments, rows.excess
    else:
        offset = weights.log.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).expm1()
        if not rule.by_token:
            raw, exact = rows.clean(weights.raw[:, 0], offset[:, 0])
            return UnitMoments(_moments(raw, rows.length, exact), rows.row_moments(raw, exact))
        excess, squares = rows.clean(offset.sum(-1), _squares(offset))
        token = rows.token_moments(weights.raw * rows.response, (excess, squares))
    return UnitMoments(token, rows.row_moments(token.total / rows.divisor, excess / rows.divisor))


def _gap_sums(rows: _Rows, train: Tensor, product: Tensor) -> GapSums[Tensor]:
    """`train`: Σ log π_train; `product`: Σ log ρ, not clamped."""
    one = rows.is_finite
    train_log_ppl, log_ppl_diff = -train / rows.divisor, -product / rows.divisor
    rollout_log_ppl = train_log_ppl - log_ppl_diff  # log_ppl_diff: rollout's mean log-prob − trainer's
    return GapSums(
        log_ratio=product * one,
        k3=rows.excess - rows.clamped,
        chi2_token=rows.excess_squares + 2.0 * rows.excess,
        chi2_sequence=(2.0 * product.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).expm1() * one,
        training_log_ppl=train_log_ppl,
        training_ppl=train_log_ppl.exp() * one,
        rollout_log_ppl=rollout_log_ppl,
        rollout_ppl=rollout_log_ppl.exp() * one,
        log_ppl_abs_diff=log_ppl_diff.abs(),
        ppl_ratio=log_ppl_diff.exp() * one,
        log_ppl_diff=rows.row_moments(log_ppl_diff),
    )


def _probability_sums(rows: _Rows, train: Tensor, rollout: Tensor) -> ProbabilitySums[Tensor]:
    """Of log-probs (B, T) that are 0 on padding and no longer needed."""
    train, rollout = train.expm1_(), rollout.expm1_()
    found = [total for x in (train, rollout) for total in (x.sum(-1), _squares(x))]
    gap = train.sub_(rollout).abs_()
    sums = rows.clean(*found, gap.sum(-1), _squares(gap), gap.amax(-1))
    return ProbabilitySums(*sums)


def _weight_sums(
    rows: _Rows, weights: Weights, raw_moments: UnitMoments[Tensor], num_kept: Tensor, rule: WeightRule
) -> WeightSums[Tensor]:
    """Bounded weights by token and by sequence, what the bound does, and the normaliser."""
    log_ratio = rows.log_ratio
    length, over_all, is_plain = log_ratio.length[:, 0], rule.normalize_over == "all", rule.metrics is None
    nonempty = (length > 0).double()
    edge = 1.0 / rule.upper if rule.bound == "truncate" else rule.lower  # where `fraction_low` starts
    above, below = weights.raw > rule.upper, weights.raw < edge
    if rule.by_token:
        above, below = above & log_ratio.mask, below & log_ratio.mask
        described = unrejected = weights.applied
        if over_all or not is_plain:
            unrejected = weights.bounded * rows.response
            described = described if is_plain else unrejected
        offset = (described - 1.0).mul_(rows.response)
        found = [total for x in (described, offset) for total in (x.sum(-1), _squares(x))]
        low, high = (described + rows.padding).amin(-1), described.amax(-1)  # weights are never negative
        total, squares, low, high = rows.clean(*found[:2], low, high)
        first, second = (
            torch.where(rows.finite, x.double(), y) for x, y in zip(found[2:], (-length, length), strict=True)
        )
        token = Moments(length, total, squares, first, second, *_extremes(low, high, length > 0))
        sequence = _moments(total / length.clamp(min=1), nonempty)
        raw = raw_moments.token.total / rows.divisor
        normalizer, n = total, num_kept
        if over_all or described is not weights.applied:
            (normalizer,) = rows.clean((unrejected if over_all else weights.applied).sum(-1))
        if over_all:
            n = rows.length
    else:
        raw, bounded = rows.clean(weights.raw[:, 0], weights.bounded[:, 0])
        counted = num_kept if is_plain else rows.length
        value = bounded * (counted > 0)
        sequence = _moments(value, nonempty)
        rejected = _moments(torch.zeros_like(value), length - counted)
        token = _moments(value, counted) + rejected
        n = rows.is_finite if over_all else (num_kept > 0).double()
        normalizer = bounded * n
    num_above, num_below = rows.clean(count(above)[:, 0], count(below)[:, 0])
    return WeightSums(
        described=UnitMoments(token, sequence),
        above=num_above,
        below=num_below,
        sequences_above=(raw > rule.upper) * rows.is_finite,
        sequences_below=(raw < edge) * rows.is_finite,
        normalizer=normalizer,
        normalizer_count=n,
    )


def _criterion_sums(
    rows: _Rows, result: CriterionResult, rule: RejectRule, weight: WeightRule
) -> CriterionSums[Tensor]:
    """Its statistic, what is out of bounds, and what it rejects by itself."""
    if rule.statistic == "ratio" and rule.reduction == "none":
        moments = rows.ratio_moments
        token_total = moments.total
    elif rule.reduction == "none":
        moments = rows.token_moments(result.values)
        token_total = moments.total
    else:
        (values,) = rows.clean(result.values[:, 0])
        moments, token_total = rows.row_moments(values), values * rows.length
    held = held_squares = torch.zeros_like(rows.length)
    if convention := _convention(weight):
        held, held_squares = rows.clean(
            *convention.held_rows(result.values, rows.response, rows.length, rule)
        )
    num_above, num_below = result.num_above[:, 0], result.num_below[:, 0]
    above, below = rows.clean(num_above, num_below)
    masked = above + below
    if rule.scope == "sequence":
        masked = result.rejected[:, 0] * rows.length
    return CriterionSums(
        values=moments,
        above=above,
        below=below,
        masked_tokens=masked,
        masked_sequences=(masked > 0).double(),
        token_total=token_total,
        held=held,
        held_squares=held_squares,
    )


# --- on the host ----------------------------------------------------------------------------------


def normalized(sums: CorrectionSums[float], factor: float, rules: CorrectionRules) -> CorrectionSums[float]:
    """The described weights' moments after dividing every weight of this mini-batch by its factor."""
    if sums.weights is None or factor == 1.0 or rules.weight.metrics is not None:
        return sums
    described = sums.weights.described
    divided = UnitMoments(described.token.divided(factor), described.sequence.divided(factor))
    return replace(sums, weights=replace(sums.weights, described=divided))


def correction_metrics(sums: CorrectionSums[float], rules: CorrectionRules) -> dict[str, float]:
    """Every `rollout_corr/*` and `training/rollout_*` metric; definitions in `rlctl.metric_names`."""
    rule, weights = rules.weight, sums.weights
    found = _gap_metrics(sums) | _rejection_metrics(sums, rules)
    found |= _unit_metrics(sums.raw, rule, "rollout_is_raw_")
    if weights is not None:
        found |= _unit_metrics(weights.described, rule, "rollout_is_")
        if convention := _convention(rule):
            found |= convention.weight_metrics(sums, rule)
        units = sums.finite_tokens if rule.by_token else sums.finite_sequences
        found["rollout_is_ratio_fraction_high"] = ratio(weights.above, units)
        found["rollout_is_ratio_fraction_low"] = ratio(weights.below, units)
        found["rollout_is_seq_fraction_high"] = ratio(weights.sequences_above, sums.finite_sequences)
        found["rollout_is_seq_fraction_low"] = ratio(weights.sequences_below, sums.finite_sequences)
    metrics = {f"rollout_corr/{name}": value for name, value in found.items()}
    return metrics | _probability_metrics(sums)


def _gap_metrics(sums: CorrectionSums[float]) -> dict[str, float]:
    gap, tokens, sequences = sums.gap, sums.finite_tokens, sums.finite_sequences
    return {
        "training_ppl": ratio(gap.training_ppl, sequences),
        "training_log_ppl": ratio(gap.training_log_ppl, sequences),
        "rollout_ppl": ratio(gap.rollout_ppl, sequences),
        "rollout_log_ppl": ratio(gap.rollout_log_ppl, sequences),
        "log_ppl_abs_diff": ratio(gap.log_ppl_abs_diff, sequences),
        "ppl_ratio": ratio(gap.ppl_ratio, sequences),
        "log_ppl_diff": gap.log_ppl_diff.mean,
        "log_ppl_diff_max": gap.log_ppl_diff.max,
        "log_ppl_diff_min": gap.log_ppl_diff.min,
        "kl": -ratio(gap.log_ratio, tokens),
        "k3_kl": ratio(gap.k3, tokens),
        "chi2_token": ratio(gap.chi2_token, tokens),
        "chi2_seq": ratio(gap.chi2_sequence, sequences),
        "nonfinite_sequences": sums.sequences - sequences,
        "saturated_sequences": sums.saturated,
    }


def _probability_metrics(sums: CorrectionSums[float]) -> dict[str, float]:
    found, n = sums.probabilities, sums.finite_tokens
    mean = ratio(found.gap, n)
    variance = max(ratio(found.gap_squares, n) - mean**2, 0.0)
    product = 0.5 * (found.train_squares + found.rollout_squares - found.gap_squares)  # from (p − q)²
    covariance = n * product - found.train * found.rollout
    spreads = [
        n * found.train_squares - found.train**2,
        n * found.rollout_squares - found.rollout**2,
    ]
    # The squares were summed in float32: a smaller spread than this is their rounding. A constant
    # column has no correlation, and 0.0 would look like disagreement.
    constant = any(
        spread <= 1e-6 * n * squares
        for spread, squares in zip(spreads, (found.train_squares, found.rollout_squares), strict=True)
    )
    pearson = 1.0 if constant else covariance / math.sqrt(spreads[0] * spreads[1])
    return {
        "training/rollout_probs_diff_mean": mean,
        "training/rollout_probs_diff_max": found.gap_max,
        "training/rollout_probs_diff_std": math.sqrt(variance * n / (n - 1)) if n > 1 else 0.0,
        "training/rollout_actor_probs_pearson_corr": min(max(pearson, -1.0), 1.0),
    }


def _unit_metrics(moments: UnitMoments[float], rule: WeightRule, prefix: str) -> dict[str, float]:
    """mean … seq_max_deviation; n counts tokens at token level, else sequences."""
    token, sequence = moments.token, moments.sequence
    unit = token if rule.by_token else sequence
    deviation = max(abs(sequence.max - 1.0), abs(sequence.min - 1.0)) if sequence.count else 0.0
    return {
        f"{prefix}mean": unit.mean,
        f"{prefix}std": unit.std,
        f"{prefix}max": unit.max,
        f"{prefix}min": unit.min,
        f"{prefix}eff_sample_size": unit.ess,
        f"{prefix}eff_sample_size_token": token.ess,
        f"{prefix}seq_mean": sequence.mean,
        f"{prefix}seq_std": sequence.sample_std,
        f"{prefix}seq_max": sequence.max,
        f"{prefix}seq_min": sequence.min,
        f"{prefix}seq_max_deviation": deviation,
    }


def _rejection_metrics(sums: CorrectionSums[float], rules: CorrectionRules) -> dict[str, float]:
    found = {
        "rollout_rs_masked_fraction": ratio(sums.tokens - sums.kept_tokens, sums.tokens),
        "rollout_rs_seq_masked_fraction": ratio(sums.rejected_sequences, sums.sequences),
    }
    for criterion, rule in zip(sums.criteria, rules.reject, strict=True):
        prefix = f"rollout_rs_{rule.name}_"
        units = sums.finite_tokens if rule.reduction == "none" else sums.finite_sequences
        values = criterion.values
        mean, std = values.mean, values.std
        if convention := _convention(rules.weight):
            mean, std = convention.criterion_moments(criterion, sums.finite_tokens)
        found |= {
            f"{prefix}mean": mean,
            f"{prefix}max": values.max,
            f"{prefix}min": values.min,
            f"{prefix}std": std,
            f"{prefix}fraction_high": ratio(criterion.above, units),
            f"{prefix}fraction_low": ratio(criterion.below, units),
            f"{prefix}masked_fraction": ratio(criterion.masked_tokens, sums.finite_tokens),
            f"{prefix}seq_masked_fraction": ratio(criterion.masked_sequences, sums.finite_sequences),
        }
    return found
