"""Metrics of rollout correction: sums on the device, metrics on the host.

Both ρ and ρ − 1 (expm1) are summed, so that variances near ρ = 1 survive rounding and effective sample sizes
are correct at any magnitude. All sums are in float64.
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
    CriterionRows,
    CriterionSums,
    GapSums,
    LogRatio,
    ProbabilitySums,
    RowSums,
    SequenceWeightRows,
    TokenWeightRows,
    UnitMoments,
    Weights,
    WeightSums,
)
from rlctl.algos.metric_sums import Moments, ratio
from rlctl.algos.row_blocks import beyond, count, total
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, RejectRule, WeightRule
from rlctl.registry import METRIC_CONVENTIONS


class MetricConvention(Protocol):
    """Alternative formulas for the metrics of weights and criteria, under the same names.

    With a convention, metrics describe weights after the bound and before rejection and normalisation.
    """

    def clamped_rows(
        self, values: Tensor, response: Tensor, length: Tensor, rule: RejectRule
    ) -> tuple[Tensor, Tensor]:
        """(B,) Σx and Σx² over a sequence's tokens, x being the statistic clamped to the bounds."""

    def criterion_moments(self, sums: CriterionSums[float], tokens: float) -> tuple[float, float]:
        """Mean and standard deviation of a criterion."""

    def weight_metrics(self, sums: CorrectionSums[float], rule: WeightRule) -> dict[str, float]:
        """`rollout_is_*` metrics that replace the default ones."""


def _convention(rule: WeightRule) -> MetricConvention | None:
    return None if rule.metrics is None else METRIC_CONVENTIONS[rule.metrics]()


# --- on the device: from tokens to rows -------------------------------------------------------------


def row_sums(
    log_ratio: LogRatio,
    weights: Weights | None,
    applied: Tensor | None,
    criteria: list[CriterionResult],
    keep: Tensor,
    rules: CorrectionRules,
) -> RowSums:
    """Per-row sums from which metrics are computed. Overwrites the log-probs in `log_ratio`.

    `applied` is (B, T): the weights of the loss, before normalisation; None without weights.
    """
    tokens, train_total = _Tokens(log_ratio), total(log_ratio.train)
    if weights is None or applied is None:
        of_weights, ratio_sums = None, tokens.ratio
    else:
        of_weights, ratio_sums = _weight_rows(tokens, weights, applied, rules.weight), None
    return RowSums(
        finite=log_ratio.finite[:, 0],
        length=log_ratio.length[:, 0],
        sequence=log_ratio.sequence[:, 0],
        train=train_total,
        clamped=total(log_ratio.token),
        excess=tokens.excess,
        excess_squares=tokens.excess_squares,
        ratio=ratio_sums,
        weights=of_weights,
        criteria=tuple(
            _criterion_rows(tokens, result, rule, rules.weight)
            for result, rule in zip(criteria, rules.reject, strict=True)
        ),
        kept=count(keep)[:, 0],
        probabilities=_probability_rows(log_ratio),
    )


class _Tokens:
    """Moments of each row's tokens, and intermediate results that several statistics share.

    Attributes:
        excess, excess_squares: (B,) Σ (ρ − 1) and Σ (ρ − 1)².
    """

    def __init__(self, log_ratio: LogRatio) -> None:
        self.log_ratio, self.length = log_ratio, log_ratio.length[:, 0]
        self.excess, self.excess_squares = _powers(log_ratio.excess)

    @cached_property
    def padding(self) -> Tensor:
        """(B, T) float32: 0 on response tokens, else a number larger than any value."""
        return (1.0 - self.log_ratio.response).mul_(1e38)

    @cached_property
    def ratio(self) -> Moments[Tensor]:
        """Of ρ."""
        return self.of_positive(
            self.log_ratio.ratio * self.log_ratio.response, (self.excess, self.excess_squares)
        )

    def of_positive(self, values: Tensor, offset: tuple[Tensor, Tensor]) -> Moments[Tensor]:
        """Of values (B, T) ≥ 0, 0.0 on padding; `offset`: Σ (value − 1) and Σ (value − 1)²."""
        lowest = (values + self.padding).amin(-1)
        return Moments(self.length, *_powers(values), *offset, values.amax(-1), -lowest)

    def of(self, values: Tensor) -> Moments[Tensor]:
        """Of values (B, T), 0.0 on padding."""
        total, squares = _powers(values)
        n, lowest = self.length, (values + self.padding).amin(-1)
        offset = total - n, squares - 2.0 * total + n
        return Moments(n, total, squares, *offset, (values - self.padding).amax(-1), -lowest)


def _powers(values: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) float64 Σ x and Σ x² over tokens, of squares in float64; exact if every x is 1."""
    precise = values.double()
    return precise.sum(-1), precise.square().sum(-1)


def _excess(log_weight: Tensor) -> Tensor:
    """w − 1, exact where w is near 1."""
    return log_weight.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).expm1()


def _probability_rows(log_ratio: LogRatio) -> ProbabilitySums[Tensor]:
    """Sums of each row; overwrites the log-probs, which are 0 on padding."""
    train, rollout = (x.exp_().mul_(log_ratio.response) for x in (log_ratio.train, log_ratio.rollout))
    sums = *_powers(train), *_powers(rollout)
    gap = train.sub_(rollout).abs_()
    return ProbabilitySums(*sums, *_powers(gap), gap.amax(-1))


def _weight_rows(
    tokens: _Tokens, weights: Weights, applied: Tensor, rule: WeightRule
) -> TokenWeightRows | SequenceWeightRows:
    log_ratio = tokens.log_ratio
    if not rule.by_token:
        return SequenceWeightRows(weights.raw[:, 0], _excess(weights.log)[:, 0], weights.bounded[:, 0])
    raw = tokens.ratio
    if weights.log is not log_ratio.token:
        raw = tokens.of_positive(weights.raw * log_ratio.response, _powers(_excess(weights.log)))
    above, below = beyond(weights.raw, rule.lower_edge, rule.upper, log_ratio.response)
    unrejected = applied
    if rule.normalize_over == "all" or rule.metrics is not None:
        unrejected = weights.bounded * log_ratio.response
    described = applied if rule.metrics is None else unrejected
    moments = tokens.of_positive(described, _powers(described - log_ratio.response))
    averaged = unrejected if rule.normalize_over == "all" else applied
    return TokenWeightRows(
        raw=raw,
        described=moments,
        above=above.sum(-1),
        below=below.sum(-1),
        normalizer=moments.total if averaged is described else total(averaged),
    )


def _criterion_rows(
    tokens: _Tokens, result: CriterionResult, rule: RejectRule, weight: WeightRule
) -> CriterionRows:
    log_ratio = tokens.log_ratio
    if rule.reduction != "none":
        values = _moments(result.values[:, 0], log_ratio.finite[:, 0].double())
    else:
        values = tokens.ratio if rule.statistic == "ratio" else tokens.of(result.values)
    clamped = torch.zeros_like(tokens.length), torch.zeros_like(tokens.length)
    if convention := _convention(weight):
        clamped = convention.clamped_rows(result.values, log_ratio.response, tokens.length, rule)
    return CriterionRows(
        values,
        result.num_above[:, 0],
        result.num_below[:, 0],
        None if rule.scope == "token" else result.rejected[:, 0],
        *clamped,
    )


# --- on the device: from rows to the batch ------------------------------------------------------------


def sums_by_row(found: RowSums, rules: CorrectionRules) -> CorrectionSums[Tensor]:
    """The sums of each row; fields are (B,). Rows that are not finite have lengths only, unless a comment
    says otherwise."""
    rows = _Rows(found)
    length, kept, product = found.length, found.kept, rows.sums.sequence
    raw = _raw_moments(rows, rules.weight)
    return CorrectionSums(
        tokens=length,
        sequences=(length > 0).double(),
        finite_tokens=rows.length,
        finite_sequences=rows.is_finite,
        kept_tokens=kept,
        kept_sequences=(kept > 0).double(),
        rejected_sequences=(kept < length).double(),
        saturated=(product.abs() >= LOG_RATIO_CLAMP).double(),
        gap=_gap_sums(rows),
        probabilities=rows.sums.probabilities,
        raw=raw,
        weights=_weight_sums(rows, length, raw, rules.weight),
        criteria=tuple(
            _criterion_sums(rows, one, rule)
            for one, rule in zip(rows.sums.criteria, rules.reject, strict=True)
        ),
    )


class _Rows:
    """Per-row sums, all (B,) float64; empty in rows that are not finite."""

    def __init__(self, found: RowSums) -> None:
        self.is_finite = found.finite
        self.sums = found.where(found.finite > 0)
        self.length = self.sums.length
        self.divisor = self.length.clamp(min=1)


def _moments(values: Tensor, n: Tensor, offset: Tensor | None = None) -> Moments[Tensor]:
    """Moments of values (B,) with multiplicity n; `offset`: value − 1, if known more precisely."""
    offset = values - 1.0 if offset is None else offset
    total, distance = values * n, offset * n
    extremes = (torch.where(n > 0, x, -math.inf) for x in (values, -values))
    return Moments(n, total, total * values, distance, distance * offset, *extremes)


def _raw_moments(rows: _Rows, rule: WeightRule) -> UnitMoments[Tensor]:
    """Moments of the weights before bound, rejection and normalisation; of ρ_t without a level."""
    weights = rows.sums.weights
    if isinstance(weights, SequenceWeightRows):
        raw, offset = weights.raw, weights.excess
        return UnitMoments(_moments(raw, rows.length, offset), _moments(raw, rows.is_finite, offset))
    sums = rows.sums.ratio if weights is None else weights.raw
    assert sums is not None
    mean, offset = sums.total / rows.divisor, sums.offset / rows.divisor
    return UnitMoments(sums, _moments(mean, rows.is_finite, offset))


def _gap_sums(rows: _Rows) -> GapSums[Tensor]:
    sums, one = rows.sums, rows.is_finite
    train_log_ppl, log_ppl_diff = -sums.train / rows.divisor, -sums.sequence / rows.divisor
    rollout_log_ppl = train_log_ppl - log_ppl_diff  # log_ppl_diff: rollout's mean log-prob − trainer's
    return GapSums(
        log_ratio=sums.sequence,
        k3=sums.excess - sums.clamped,
        chi2_token=sums.excess_squares + 2.0 * sums.excess,
        chi2_sequence=(2.0 * sums.sequence.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).expm1(),
        training_log_ppl=train_log_ppl,
        training_ppl=train_log_ppl.exp() * one,
        rollout_log_ppl=rollout_log_ppl,
        rollout_ppl=rollout_log_ppl.exp() * one,
        log_ppl_abs_diff=log_ppl_diff.abs(),
        ppl_ratio=log_ppl_diff.exp() * one,
        log_ppl_diff=_moments(log_ppl_diff, one),
    )


def _weight_sums(
    rows: _Rows, length: Tensor, raw_moments: UnitMoments[Tensor], rule: WeightRule
) -> WeightSums[Tensor] | None:
    """Sums of weights per token and per sequence, of the bound's effect, and of the normaliser.

    Rows that are not finite have weight 0. `length`: (B,), including such rows.
    """
    weights, kept, over_all = rows.sums.weights, rows.sums.kept, rule.normalize_over == "all"
    if weights is None:
        return None
    nonempty = (length > 0).double()
    if isinstance(weights, TokenWeightRows):
        sums = weights.described
        token = sums + _moments(torch.zeros_like(length), length - rows.length)
        sequence = _moments(sums.total / length.clamp(min=1), nonempty)
        raw = raw_moments.token.total / rows.divisor
        normalizer, count = weights.normalizer, rows.length if over_all else kept
    else:
        raw, bounded = weights.raw, weights.bounded
        num_tokens = kept if rule.metrics is None else rows.length
        value = bounded * (num_tokens > 0)
        sequence = _moments(value, nonempty)
        token = _moments(value, num_tokens) + _moments(torch.zeros_like(value), length - num_tokens)
        count = rows.is_finite if over_all else (kept > 0).double()
        normalizer = bounded * count
    above, below = (raw > rule.upper) * rows.is_finite, (raw < rule.lower_edge) * rows.is_finite
    return WeightSums(
        described=UnitMoments(token, sequence),
        above=weights.above if isinstance(weights, TokenWeightRows) else above,
        below=weights.below if isinstance(weights, TokenWeightRows) else below,
        sequences_above=above,
        sequences_below=below,
        normalizer=normalizer,
        normalizer_count=count,
    )


def _criterion_sums(rows: _Rows, found: CriterionRows, rule: RejectRule) -> CriterionSums[Tensor]:
    """Sums of one criterion's statistic, of its bound violations, and of what it rejects."""
    values, by_token = found.values, rule.reduction == "none"
    masked = found.above + found.below if found.rejected is None else found.rejected * rows.length
    return CriterionSums(
        values=values,
        above=found.above,
        below=found.below,
        masked_tokens=masked,
        masked_sequences=(masked > 0).double(),
        token_total=values.total if by_token else values.total * rows.length,
        clamped=found.clamped,
        clamped_squares=found.clamped_squares,
    )


# --- on the host ----------------------------------------------------------------------------------


def normalized(sums: CorrectionSums[float], factor: float, rules: CorrectionRules) -> CorrectionSums[float]:
    """The sums after dividing every described weight of this mini-batch by the normalisation factor."""
    if sums.weights is None or factor == 1.0 or rules.weight.metrics is not None:
        return sums
    described = sums.weights.described
    divided = UnitMoments(described.token.divided(factor), described.sequence.divided(factor))
    return replace(sums, weights=replace(sums.weights, described=divided))


def correction_metrics(sums: CorrectionSums[float], rules: CorrectionRules) -> dict[str, float]:
    """Every `rollout_corr/*` and `training/rollout_*` metric; definitions in `rlctl.metric_names`.

    Without a finite token there is nothing to average: then only counts and rejected fractions.
    """
    rule, weights = rules.weight, sums.weights
    found = {
        "nonfinite_sequences": sums.sequences - sums.finite_sequences,
        "saturated_sequences": sums.saturated,
        "rollout_rs_masked_fraction": ratio(sums.tokens - sums.kept_tokens, sums.tokens),
        "rollout_rs_seq_masked_fraction": ratio(sums.rejected_sequences, sums.sequences),
    }
    if not sums.finite_tokens:
        return {f"rollout_corr/{name}": value for name, value in found.items()}
    found |= _gap_metrics(sums) | _criterion_metrics(sums, rules)
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


def parts_with_nan(sums: CorrectionSums[float], rules: CorrectionRules) -> list[str]:
    """The weight and the criteria that returned NaN for sequences with finite log-probs, for a message."""
    found = [
        f"rejection criterion {rule.name}"
        for criterion, rule in zip(sums.criteria, rules.reject, strict=True)
        if math.isnan(criterion.values.total)
    ]
    if math.isnan(sums.raw.token.total):
        found.append(f"correction weight {rules.weight.level}")
    return found


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
    # A smaller spread than this is rounding error. A constant has no correlation; 1.0 is reported because
    # 0.0 would mean disagreement.
    constant = any(
        spread <= 1e-13 * n * squares
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
    """Metrics `mean` to `seq_max_deviation`; over tokens at token level, else over sequences."""
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


def _criterion_metrics(sums: CorrectionSums[float], rules: CorrectionRules) -> dict[str, float]:
    found: dict[str, float] = {}
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
