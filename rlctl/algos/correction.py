"""Rollout correction: importance weights and rejection between π_rollout and π_train.

Formulas of docs/explanation/rollout-correction.md, in its order: ratio → weight → rejection → normalisation.
Shapes: B sequences of up to T tokens; (B, 1) is one number per sequence. Log-ratios, and sums of them, are
clamped to ±20 before `exp`. Nothing here moves data to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.algos.correction_records import Correction, CorrectionSums, CriterionResult, LogRatio, Weights
from rlctl.algos.row_blocks import (
    CorrectedRows,
    Extras,
    all_true,
    as_float,
    beyond,
    clamped_exp,
    count,
    evaluated,
    in_row_blocks,
    total,
    zero_outside,
)
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, RejectRule, WeightRule
from rlctl.algos.statistics import row_sums, sums_by_row
from rlctl.registry import CORRECTION_WEIGHTS, REJECTION_CRITERIA


@torch.no_grad()
def correct(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    rules: CorrectionRules,
    *,
    advantages: Tensor | None = None,
    age: Tensor | None = None,
) -> Correction:
    """Weights, rejection mask and sums of one batch.

    Args:
        log_probs: (B, T) float32, log π_train of the sampled tokens (π_old or π_θ, by mode).
        rollout_log_probs: (B, T) float32, log π_rollout of the same tokens.
        response_mask: (B, T) bool; values where it is False have no effect, even NaN.
        rules: what to compute.
        advantages, age: (B, T) and (B,), required if listed in `rules.needs`; see `Extras`.

    Raises:
        ValueError: as `row_blocks.check_inputs`.
    """
    inputs = (log_probs, rollout_log_probs, response_mask, Extras(advantages, age), rules)
    weights, keep, rows = in_row_blocks(correct_rows, *inputs)
    by_row = sums_by_row(rows, rules)
    nonfinite = (rows.length > 0) & (rows.finite == 0)
    return Correction(weights, keep, nonfinite, by_row.saturated > 0, by_row)


def correct_rows(
    train: Tensor, rollout: Tensor, mask: Tensor, extras: Extras, rules: CorrectionRules
) -> CorrectedRows:
    """Computes weights, rejection mask and metric sums of each row independently."""
    log_ratio = masked_log_ratio(train, rollout, mask, extras)
    weights = importance_weights(log_ratio, rules.weight)
    criteria = [check_criterion(log_ratio, rule) for rule in rules.reject]
    keep = rejection_mask(log_ratio, criteria)
    applied = None if weights is None else applied_weights(weights, keep)
    return applied, keep, row_sums(log_ratio, weights, applied, criteria, keep, rules)


def masked_log_ratio(train: Tensor, rollout: Tensor, mask: Tensor, extras: Extras) -> LogRatio:
    """log ρ_t = log π_train(t) − log π_rollout(t), and its sum over each sequence's response tokens."""
    given = [train, rollout] if extras.advantages is None else [train, rollout, extras.advantages]
    train, rollout, *advantages = zero_outside(mask, *(x.to(train.dtype) for x in given))
    token = train - rollout
    sequence = total(token)[:, None]  # NaN or infinite if any value of the row is
    is_finite, length = sequence.isfinite(), count(mask).double()
    return LogRatio(
        token=token.nan_to_num_(nan=0.0).clamp_(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP),
        sequence=torch.where(is_finite, sequence, 0.0),
        length=length,
        finite=is_finite & (length > 0),
        mask=mask,
        train=train,
        rollout=rollout,
        advantages=advantages[0] if advantages else None,
        age=extras.age,
    )


def importance_weights(log_ratio: LogRatio, rule: WeightRule) -> Weights | None:
    """w = ρ_t, Π ρ, (Π ρ)^(1/length) or another registered weight, and bounded; None without a level."""
    if rule.level is None:
        return None
    log_weight = evaluated(CORRECTION_WEIGHTS, rule.level, log_ratio, rule.params)
    raw = log_ratio.ratio if log_weight is log_ratio.token else clamped_exp(log_weight)
    return Weights(log_weight, raw, bound(raw, rule))


def bound(weights: Tensor, rule: WeightRule) -> Tensor:
    """`clip`: clip(w, lower, upper). `truncate`: min(w, upper). `mask`: w in [lower, upper], else 0."""
    if rule.bound == "mask":
        return weights * as_float((weights >= rule.lower) & (weights <= rule.upper))
    return weights.clamp(min=rule.lower if rule.bound == "clip" else None, max=rule.upper)


def criterion_values(log_ratio: LogRatio, rule: RejectRule) -> Tensor:
    """The statistic per token (B, T), or its sum, mean or maximum per sequence (B, 1) float64."""
    if rule.statistic == "ratio" and rule.reduction in ("sum", "mean"):  # product or geometric mean
        return clamped_exp(log_ratio.sequence if rule.reduction == "sum" else log_ratio.mean)
    values = evaluated(REJECTION_CRITERIA, rule.statistic, log_ratio, rule.params)
    if rule.reduction == "none":
        return values
    if rule.reduction == "max":
        is_signed = rule.statistic in ("ratio", "k1")  # k2, k3 are ≥ 0, and 0 on padding
        values = values.masked_fill(~log_ratio.mask, -torch.inf) if is_signed else values
        return values.amax(-1, keepdim=True).double()
    summed = total(values)[:, None]  # (B, 1) stays unchanged
    return summed / log_ratio.length.clamp(min=1) if rule.reduction == "mean" else summed


def check_criterion(log_ratio: LogRatio, rule: RejectRule) -> CriterionResult:
    """Evaluates one criterion: its statistic, bound violations, and the tokens or sequences it rejects."""
    values = criterion_values(log_ratio, rule)
    units = log_ratio.response if rule.reduction == "none" else as_float(log_ratio.finite)
    above, below = beyond(values, rule.lower, rule.upper, units)
    num_above, num_below = above.sum(-1, keepdim=True), below.sum(-1, keepdim=True)
    rejected = (above + below if rule.scope == "token" else num_above + num_below).bool()
    if rule.negative_advantage_only and log_ratio.advantages is not None:
        rejected = rejected & (log_ratio.advantages.sum(-1, keepdim=True) < 0)
    return CriterionResult(values, num_above, num_below, rejected)


def rejection_mask(log_ratio: LogRatio, results: list[CriterionResult]) -> Tensor:
    """(B, T) bool: response tokens of finite sequences that pass every criterion."""
    return all_true(log_ratio.mask, log_ratio.finite, *(~result.rejected for result in results))


def applied_weights(weights: Weights, keep: Tensor) -> Tensor:
    """(B, T) float32: the bounded weight of every token that is kept, else 0.0."""
    return as_float(keep).mul_(weights.bounded.float())


def normalization_factor(sums: CorrectionSums[float], rules: CorrectionRules) -> float:
    """Mean weight of the whole mini-batch, the divisor of its weights; 1.0 without normalisation."""
    if sums.weights is None or not rules.weight.normalize:
        return 1.0
    return sums.weights.normalizer_mean if sums.weights.normalizer_mean > 0.0 else 1.0
