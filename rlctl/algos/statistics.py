"""What rollout correction measures: sums on the device, metrics on the host.

Ratios are summed as they are and as distances from 1 (expm1): variances near ρ = 1 survive rounding, and
effective sample sizes are right at any magnitude. Rows add up in float32, all else in float64.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from rlctl.algos import verl_metrics
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
from rlctl.algos.metric_sums import Moments, moments_of, ratio
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, RejectRule, WeightRule

# --- on the device --------------------------------------------------------------------------------


def correction_sums(
    train: Tensor,
    rollout: Tensor,
    mask: Tensor,
    log_ratio: LogRatio,
    criteria: list[CriterionResult],
    keep: Tensor,
    weights: Weights | None,
    rules: CorrectionRules,
) -> CorrectionSums[Tensor]:
    """The sums of some rows; all (B, T) or as in the records."""
    finite, length = log_ratio.finite[:, 0], log_ratio.length[:, 0]
    train, rollout = (torch.where(mask, x, 0.0) for x in (train, rollout))
    num_kept = _count(keep)
    tokens = _Tokens(log_ratio, mask)
    raw = _raw_moments(tokens, log_ratio, weights, rules.weight)
    return CorrectionSums(
        tokens=length.sum(),
        sequences=(length > 0).double().sum(),
        finite_tokens=_total(length, finite),
        finite_sequences=finite.double().sum(),
        kept_tokens=num_kept.sum(),
        kept_sequences=(num_kept > 0).double().sum(),
        rejected_sequences=(num_kept < length).double().sum(),
        saturated=_total((log_ratio.sequence[:, 0].abs() >= LOG_RATIO_CLAMP).double(), finite),
        gap=_gap_sums(tokens, _row_sum(train), log_ratio),
        probabilities=_probability_sums(train, rollout, finite),
        raw=raw,
        weights=None if weights is None else _weight_sums(weights, tokens, keep, rules.weight),
        criteria=tuple(
            _criterion_sums(result, tokens, rule, held=verl_metrics.apply(rules.weight))
            for result, rule in zip(criteria, rules.reject, strict=True)
        ),
    )


class _Tokens:
    """What several statistics share. Masked copies are slow: `response` multiplies, `padding` is added.

    Attributes:
        mask: (B, T) bool.
        response: (B, T) float32, 1 on response tokens, else 0.
        padding: (B, T) float32, 0 on response tokens, else a number beyond all others.
        finite, length: (B,) of the log-ratio.
        excess, excess_squares: (B,) sums of ρ − 1.
        clamped: (B,) sum of the clamped log ρ.
        lowest, highest: (B,) of ρ.
        ratio_mean: (B,) mean ρ, set by `ratio_moments`.
    """

    def __init__(self, log_ratio: LogRatio, mask: Tensor) -> None:
        self.mask, self.response = mask, mask.float()
        self.padding = (1.0 - self.response) * 1e38
        self.finite, self.length = log_ratio.finite[:, 0], log_ratio.length[:, 0]
        excess = log_ratio.token.expm1()
        self.excess, self.excess_squares = _row_sum(excess), _row_squares(excess)
        self.clamped = _row_sum(log_ratio.token)
        low, high = self.row_extremes(log_ratio.token)
        self.lowest, self.highest = low.exp(), high.exp()

    def row_extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest response token of each row of (B, T)."""
        low, high = (values + self.padding).amin(-1), (values - self.padding).amax(-1)
        return low.double(), high.double()

    def ratio_moments(self, ratios: Tensor) -> UnitMoments[Tensor]:
        """Of ρ (B, T) over tokens, and of each sequence's mean ρ."""
        ratios = ratios * self.response
        total = _row_sum(ratios)
        mean, offset = (x / self.length.clamp(min=1) for x in (total, self.excess))
        self.ratio_mean = mean
        return UnitMoments(
            _from_rows(
                self.finite,
                (self.length, total, _row_squares(ratios), self.excess, self.excess_squares),
                (self.highest, -self.lowest),
            ),
            moments_of(mean, self.finite, offset=offset),
        )


def _raw_moments(
    tokens: _Tokens, log_ratio: LogRatio, weights: Weights | None, rule: WeightRule
) -> UnitMoments[Tensor]:
    """Of the weights before bound, rejection and normalisation; of ρ_t without a level."""
    if weights is None:
        return tokens.ratio_moments(log_ratio.token.exp())
    if rule.level == "token":
        return tokens.ratio_moments(weights.raw)
    log_weight = log_ratio.sequence if rule.level == "sequence" else log_ratio.mean
    raw = weights.raw[:, 0]
    offset = log_weight[:, 0].clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).expm1()
    return UnitMoments(
        moments_of(raw, tokens.finite, tokens.length, offset), moments_of(raw, tokens.finite, offset=offset)
    )


def _gap_sums(tokens: _Tokens, train: Tensor, log_ratio: LogRatio) -> GapSums[Tensor]:
    """`train`: (B,) Σ log π_train."""
    finite = tokens.finite
    train_log_ppl = -train / tokens.length.clamp(min=1)
    log_ppl_diff = -log_ratio.mean[:, 0]  # rollout's mean log-prob − trainer's
    rollout_log_ppl = train_log_ppl - log_ppl_diff
    product = log_ratio.sequence[:, 0].clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return GapSums(
        log_ratio=_total(log_ratio.sequence[:, 0], finite),
        k3=_total(tokens.excess - tokens.clamped, finite),
        chi2_token=_total(tokens.excess_squares + 2.0 * tokens.excess, finite),
        chi2_sequence=_total((2.0 * product).expm1(), finite),
        training_log_ppl=_total(train_log_ppl, finite),
        training_ppl=_total(train_log_ppl.exp(), finite),
        rollout_log_ppl=_total(rollout_log_ppl, finite),
        rollout_ppl=_total(rollout_log_ppl.exp(), finite),
        log_ppl_abs_diff=_total(log_ppl_diff.abs(), finite),
        ppl_ratio=_total(log_ppl_diff.exp(), finite),
        log_ppl_diff=moments_of(log_ppl_diff, finite),
    )


def _probability_sums(train: Tensor, rollout: Tensor, finite: Tensor) -> ProbabilitySums[Tensor]:
    """Of log-probs (B, T) that are 0 on padding and no longer needed."""
    train_prob, rollout_prob = train.exp_().sub_(1.0), rollout.exp_().sub_(1.0)
    of_train, of_train_squares = _row_sum(train_prob), _row_squares(train_prob)
    of_rollout, of_rollout_squares = _row_sum(rollout_prob), _row_squares(rollout_prob)
    gap = train_prob.sub_(rollout_prob).abs_()
    return ProbabilitySums(
        train=_total(of_train, finite),
        train_squares=_total(of_train_squares, finite),
        rollout=_total(of_rollout, finite),
        rollout_squares=_total(of_rollout_squares, finite),
        gap=_total(_row_sum(gap), finite),
        gap_squares=_total(_row_squares(gap), finite),
        gap_max=torch.where(finite, gap.amax(-1).double(), 0.0).amax(),
    )


def _weight_sums(weights: Weights, tokens: _Tokens, keep: Tensor, rule: WeightRule) -> WeightSums[Tensor]:
    """Bounded weights by token and by sequence, what the bound does, and the normaliser."""
    finite, length = tokens.finite, tokens.length
    nonempty, edge, over_all = length > 0, _lower_edge(rule), rule.normalize_over == "all"
    above, below = weights.raw > rule.upper, weights.raw < edge
    if rule.level == "token":
        num_above, num_below = _count(above & tokens.mask), _count(below & tokens.mask)
        unrejected = described = weights.applied
        if verl_metrics.apply(rule) or over_all:
            unrejected = weights.bounded * tokens.response
        if verl_metrics.apply(rule):
            described = unrejected
        zero = torch.zeros_like(length)
        offset = (described - 1.0).mul_(tokens.response)
        low, high = (described + tokens.padding).amin(-1), described.amax(-1)  # weights are never negative
        sums = (_row_sum(described), _row_squares(described), _row_sum(offset), _row_squares(offset))
        rows = [
            torch.where(finite, x, bad) for x, bad in zip(sums, (zero, zero, -length, length), strict=True)
        ]
        total = rows[0]
        lowest, highest = (torch.where(finite, x.double(), 0.0) for x in (low, high))
        token = _from_rows(nonempty, (length, *rows), (highest, -lowest))
        sequence = moments_of(total / length.clamp(min=1), nonempty)
        sequence_raw = tokens.ratio_mean
        normalizer = _total(_row_sum(unrejected), finite) if over_all else _row_sum(weights.applied).sum()
        count = _total(length, finite) if over_all else _count(keep).sum()
    else:
        num_above, num_below = above[:, 0], below[:, 0]
        sequence_raw, bounded = weights.raw[:, 0], weights.bounded[:, 0]
        num_kept = torch.where(finite, length, 0.0) if verl_metrics.apply(rule) else _count(keep)
        value = torch.where(num_kept > 0, bounded, 0.0)
        sequence = moments_of(value, nonempty)
        rejected = moments_of(torch.zeros_like(value), nonempty, length - num_kept)
        token = moments_of(value, nonempty, num_kept) + rejected
        who = finite if over_all else _count(keep) > 0
        normalizer, count = _total(bounded, who), who.double().sum()
    return WeightSums(
        described=UnitMoments(token, sequence),
        above=_total(num_above.double(), finite),
        below=_total(num_below.double(), finite),
        sequences_above=(finite & (sequence_raw > rule.upper)).double().sum(),
        sequences_below=(finite & (sequence_raw < edge)).double().sum(),
        normalizer=normalizer,
        normalizer_count=count,
    )


def _lower_edge(rule: WeightRule) -> float:
    """Where `ratio_fraction_low` starts: the lower bound, or 1/c for a truncation at c."""
    return 1.0 / rule.upper if rule.bound == "truncate" else rule.lower


def _criterion_sums(
    result: CriterionResult, tokens: _Tokens, rule: RejectRule, *, held: bool
) -> CriterionSums[Tensor]:
    """Its statistic, what is out of bounds, and what it rejects by itself."""
    finite, length = tokens.finite, tokens.length
    if rule.reduction == "none":
        values = result.values * tokens.response
        token_total, squares = _row_sum(values), _row_squares(values)
        offset, offset_squares = token_total - length, squares - 2.0 * token_total + length
        if rule.statistic == "ratio":
            offset, offset_squares = tokens.excess, tokens.excess_squares
        low, high = tokens.row_extremes(values)
        sums = (length, token_total, squares, offset, offset_squares)
        moments = _from_rows(finite, sums, (high, -low))
    else:
        moments = moments_of(result.values[:, 0], finite)
        token_total = torch.where(finite, result.values[:, 0] * length, 0.0)
    masked = _count(result.rejected) if rule.scope == "token" else result.rejected[:, 0] * length
    no_rows = torch.zeros_like(length), torch.zeros_like(length)
    held_rows = verl_metrics.held_rows(result.values, tokens.response, length, rule) if held else no_rows
    return CriterionSums(
        values=moments,
        above=_total(_count(result.above), finite),
        below=_total(_count(result.below), finite),
        masked_tokens=_total(masked, finite),
        masked_sequences=(finite & (masked > 0)).double().sum(),
        token_total=_total(token_total, finite),
        held=_total(held_rows[0], finite),
        held_squares=_total(held_rows[1], finite),
    )


def _from_rows(who: Tensor, sums: tuple[Tensor, ...], maxima: tuple[Tensor, Tensor]) -> Moments[Tensor]:
    """Moments from row sums (B,) of the rows `who`, in the order of the fields."""
    added = torch.where(who, torch.stack(sums), 0.0).sum(-1).unbind()
    largest = torch.where(who, torch.stack(maxima), -math.inf).amax(-1).unbind()
    return Moments(*added, *largest)


def _row_sum(values: Tensor) -> Tensor:
    return values.sum(-1).double()


def _row_squares(values: Tensor) -> Tensor:
    """Row-wise Σ x², exact for ones."""
    return values.square().sum(-1).double()


def _count(where: Tensor) -> Tensor:
    """True cells per row (the dtype spares a conversion of the whole block)."""
    return where.sum(-1, dtype=torch.int32).double()


def _total(values: Tensor, who: Tensor) -> Tensor:
    """Over the rows `who`; selecting them would wait for a GPU."""
    return torch.where(who, values, 0.0).sum()


# --- on the host ----------------------------------------------------------------------------------


def normalized(sums: CorrectionSums[float], factor: float, rules: CorrectionRules) -> CorrectionSums[float]:
    """The described weights' moments after dividing every weight of this mini-batch by its factor."""
    if sums.weights is None or factor == 1.0 or verl_metrics.apply(rules.weight):
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
        if verl_metrics.apply(rule):
            found |= verl_metrics.weight_metrics(sums, rule)
        units = sums.finite_tokens if rule.level == "token" else sums.finite_sequences
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
    unit = token if rule.level in (None, "token") else sequence
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
        if verl_metrics.apply(rules.weight):
            mean, std = verl_metrics.criterion_moments(criterion, sums.finite_tokens)
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
