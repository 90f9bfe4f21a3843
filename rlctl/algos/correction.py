"""Rollout correction: importance weights and rejection between π_rollout and π_train.

The formulas of docs/explanation/rollout-correction.md, in its order: ratio → weight → rejection →
normalisation. Shapes: B sequences of up to T tokens; (B, 1) is one number per sequence. Log-ratios, and
sums of them, are clamped to ±20 before `exp`. Nothing here moves data to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.algos.correction_records import Correction, CorrectionSums, CriterionResult, LogRatio, Weights
from rlctl.algos.row_blocks import check_inputs, in_row_blocks
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, RejectRule, Statistic, WeightRule
from rlctl.algos.statistics import correction_sums


@torch.no_grad()
def correct(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    rules: CorrectionRules,
    *,
    advantages: Tensor | None = None,
) -> Correction:
    """Weights, rejection mask and sums of one batch.

    Args:
        log_probs: (B, T) float32, log π_train of the sampled tokens (π_old or π_θ, by mode).
        rollout_log_probs: (B, T) float32, log π_rollout of the same tokens.
        response_mask: (B, T) bool; what is False is never read, NaN included.
        rules: what to compute.
        advantages: (B, T), needed by rules with `negative_advantage_only`.

    Raises:
        ValueError: shapes differ, log-probs are in half precision, nothing is in the batch, or a rule
            needs advantages and got none.
    """
    inputs = (log_probs, rollout_log_probs, response_mask, advantages, rules)
    check_inputs(*inputs)
    return in_row_blocks(correct_rows, *inputs)


def correct_rows(
    train: Tensor, rollout: Tensor, mask: Tensor, advantages: Tensor | None, rules: CorrectionRules
) -> Correction:
    """`correct` of checked inputs. Every row is corrected by itself."""
    log_ratio = masked_log_ratio(train, rollout, mask)
    criteria = [check_criterion(log_ratio, mask, rule, advantages) for rule in rules.reject]
    keep = rejection_mask(log_ratio, mask, criteria)
    weights = importance_weights(log_ratio, keep, rules.weight)
    sums = correction_sums(train, rollout, mask, log_ratio, criteria, keep, weights, rules)
    applied = None if weights is None else weights.applied
    return Correction(applied, keep, ((log_ratio.length > 0) & ~log_ratio.finite)[:, 0], sums)


# --- ratio ----------------------------------------------------------------------------------------
def masked_log_ratio(train: Tensor, rollout: Tensor, mask: Tensor) -> LogRatio:
    """log ρ_t = log π_train(t) − log π_rollout(t), and its sum over each sequence's response tokens."""
    token = torch.where(mask, train - rollout, 0.0)
    total = token.sum(-1, keepdim=True)  # a NaN or infinity anywhere in the row shows in its sum
    length = mask.sum(-1, keepdim=True, dtype=torch.int32).double()
    return LogRatio(
        token=token.nan_to_num_(nan=0.0).clamp_(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP),
        sequence=torch.where(total.isfinite(), total, 0.0).double(),
        length=length,
        finite=total.isfinite() & (length > 0),
    )


# --- weight ---------------------------------------------------------------------------------------
def importance_weights(log_ratio: LogRatio, keep: Tensor, rule: WeightRule) -> Weights | None:
    """w = ρ_t, Π ρ or (Π ρ)^(1/length); bounded; 0 where rejected. None without a level."""
    if rule.level is None:
        return None
    if rule.level == "token":
        raw = log_ratio.token.exp()
    else:
        raw = clamped_exp(log_ratio.sequence if rule.level == "sequence" else log_ratio.mean)
    bounded = bound(raw, rule)
    return Weights(raw, bounded, applied=torch.where(keep, bounded.float(), 0.0))


def bound(weights: Tensor, rule: WeightRule) -> Tensor:
    """`clip`: clip(w, lower, upper). `truncate`: min(w, upper). `mask`: w in [lower, upper], else 0."""
    if rule.bound == "mask":
        return weights * ((weights >= rule.lower) & (weights <= rule.upper))
    return weights.clamp(min=rule.lower if rule.bound == "clip" else None, max=rule.upper)


# --- rejection ------------------------------------------------------------------------------------
def rejection_mask(log_ratio: LogRatio, mask: Tensor, results: list[CriterionResult]) -> Tensor:
    """(B, T) bool: response tokens of finite sequences that pass every criterion."""
    keep = mask & log_ratio.finite
    for result in results:
        keep = keep & ~result.rejected
    return keep


def check_criterion(
    log_ratio: LogRatio, mask: Tensor, rule: RejectRule, advantages: Tensor | None
) -> CriterionResult:
    """One criterion: its statistic, where that is out of bounds, and what it rejects."""
    values = criterion_values(log_ratio, mask, rule)
    response = mask if rule.reduction == "none" else log_ratio.finite
    above = response & (values > rule.upper) if rule.upper is not None else torch.zeros_like(response)
    below = response & (values < rule.lower) if rule.lower is not None else torch.zeros_like(response)
    rejected = above | below
    if rule.scope == "sequence":
        rejected = rejected.any(-1, keepdim=True)
    if rule.negative_advantage_only and advantages is not None:
        rejected = rejected & (torch.where(mask, advantages, 0.0).sum(-1, keepdim=True) < 0)
    return CriterionResult(values, above, below, rejected)


def criterion_values(log_ratio: LogRatio, mask: Tensor, rule: RejectRule) -> Tensor:
    """The statistic per token (B, T), or its sum, mean or maximum per sequence (B, 1) float64."""
    if rule.statistic == "ratio" and rule.reduction in ("sum", "mean"):  # a product, a geometric mean
        return clamped_exp(log_ratio.sequence if rule.reduction == "sum" else log_ratio.mean)
    values = token_statistic(log_ratio.token, rule.statistic)
    if rule.reduction == "none":
        return values
    if rule.reduction == "max":
        is_signed = rule.statistic in ("ratio", "k1")  # of padding k1 = k2 = k3 = 0, and k2, k3 ≥ 0
        values = values.masked_fill(~mask, -torch.inf) if is_signed else values
        return values.amax(-1, keepdim=True).double()
    total = values.sum(-1, keepdim=True).double()
    return total if rule.reduction == "sum" else total / log_ratio.length.clamp(min=1)


def token_statistic(log_ratio: Tensor, statistic: Statistic) -> Tensor:
    """ρ, k1 = −log ρ, k2 = ½ log² ρ or k3 = ρ − 1 − log ρ of each token."""
    if statistic == "ratio":
        return log_ratio.exp()
    if statistic == "k1":
        return -log_ratio
    return 0.5 * log_ratio.square() if statistic == "k2" else log_ratio.expm1() - log_ratio


# --- normalisation --------------------------------------------------------------------------------
def normalization_factor(sums: CorrectionSums[float], rules: CorrectionRules) -> float:
    """Mean weight of the whole mini-batch, by which its weights are divided (1.0: nothing to do)."""
    if sums.weights is None or not rules.weight.normalize:
        return 1.0
    mean = sums.weights.normalizer_mean
    return mean if mean > 0.0 else 1.0


def clamped_exp(log_weight: Tensor) -> Tensor:
    """exp(clip(log w, ±20))."""
    return log_weight.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
