"""Rollout correction: importance weights and rejection between π_rollout and π_train.

The whole computation is one walk over the batch in blocks of rows small enough to stay in cache,
each block yielding per-row sums; everything about sequences then happens on (B,) vectors. Sums and
counts leave this module (`Tally`), never averages, so that any division of a mini-batch into
micro-batches and ranks adds up to the same weights, masks and metrics. Nothing here moves data to
the host.

Notation: r_t = log π_train(t) − log π_rollout(t), ρ_t = exp(r_t), clamped to ±20 before `exp`;
e = ρ − 1 is kept instead of ρ because float32 resolves it near the healthy value ρ = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.algos.correction_metrics import Rows, build_tally, policy_gap_sums, row_squares
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, RejectRule, WeightRule
from rlctl.algos.tally import Tally

#: Elements per block: half a MiB of float32 stays in a core's cache; a GPU wants large kernels.
_BLOCK_CPU = 1 << 17
_BLOCK_CUDA = 1 << 24


@dataclass(frozen=True, slots=True)
class Correction:
    """What correction does to one (part of a) mini-batch.

    Attributes:
        weights: (B, T) float32, detached: after the bound, 0.0 where rejected, **not yet
            normalised** (the factor belongs to the whole mini-batch, see `Tally`). None when the
            rule has no level. May be an expanded view: do not write to it.
        keep_mask: (B, T) bool, True where the token survives rejection; like the weights it means
            something only under `response_mask`, and may be an expanded view.
        nonfinite: (B,) bool, sequences with a NaN or infinite log-prob (always rejected).
        tally: sums and maxima from which metrics and denominators follow.
    """

    weights: Tensor | None
    keep_mask: Tensor
    nonfinite: Tensor
    tally: Tally


@torch.no_grad()
def correct(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    rules: CorrectionRules,
    *,
    advantages: Tensor | None = None,
) -> Correction:
    """Weights, rejection mask and tally of one batch.

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
    _check_inputs(log_probs, rollout_log_probs, response_mask)
    if response_mask.numel() == 0:
        raise ValueError("an empty batch has no correction")
    if advantages is None and any(rule.negative_advantage_only for rule in rules.reject):
        raise ValueError("a rule with negative_advantage_only needs advantages")

    batch, horizon = response_mask.shape
    token_weights = torch.empty_like(rollout_log_probs) if rules.weight.level == "token" else None
    token_keep = torch.empty_like(response_mask) if any(r.scope == "token" for r in rules.reject) else None
    blocks: list[Rows] = []
    for start in range(0, batch, step := _rows_per_block(response_mask, horizon)):
        part = slice(start, start + step)
        blocks.append(
            _token_pass(
                log_probs[part],
                rollout_log_probs[part],
                response_mask[part],
                rules,
                None if token_weights is None else token_weights[part],
                None if token_keep is None else token_keep[part],
            )
        )
        if advantages is not None:
            blocks[-1]["advantage"] = torch.where(response_mask[part], advantages[part], 0.0).sum(-1)
    return _sequence_pass(blocks, response_mask, rules, token_weights, token_keep)


def _rows_per_block(mask: Tensor, horizon: int) -> int:
    return max(1, (_BLOCK_CUDA if mask.is_cuda else _BLOCK_CPU) // max(horizon, 1))


def _check_inputs(log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> None:
    if not log_probs.shape == rollout_log_probs.shape == response_mask.shape:
        raise ValueError(
            f"shapes differ: log_probs {tuple(log_probs.shape)}, rollout_log_probs "
            f"{tuple(rollout_log_probs.shape)}, response_mask {tuple(response_mask.shape)}"
        )
    if response_mask.dtype != torch.bool:
        raise ValueError(f"response_mask must be bool, not {response_mask.dtype}")
    for log_prob in (log_probs, rollout_log_probs):
        if log_prob.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"log-probs must be float32: {log_prob.dtype} rounds away what is to be measured"
            )


# --- tokens ---------------------------------------------------------------------------------------


def _token_pass(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    rules: CorrectionRules,
    weights_out: Tensor | None,
    keep_out: Tensor | None,
) -> Rows:
    """Per-row sums of one block; fills its part of the per-token weights and mask."""
    log_ratio = torch.where(mask, log_probs - rollout_log_probs, 0.0)
    rows: Rows = {"length": _count(mask), "log_ratio": log_ratio.sum(-1)}
    # A NaN or infinity anywhere in the row shows in its sum; the row is rejected later, and its
    # values are made harmless here.
    log_ratio.nan_to_num_(nan=0.0).clamp_(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    excess = torch.expm1(log_ratio)

    # Added or subtracted, it keeps padding out of an extreme: much cheaper than a masked copy each time.
    padding = torch.where(mask, 0.0, torch.inf)
    rows |= {"log_ratio_min": (log_ratio + padding).amin(-1), "log_ratio_max": (log_ratio - padding).amax(-1)}
    rows |= {"log_ratio_clamped": log_ratio.sum(-1)}
    rows |= {"excess": excess.sum(-1), "excess_sq": row_squares(excess)}
    rows |= policy_gap_sums(log_probs, rollout_log_probs, mask)

    keep = mask
    for index, rule in enumerate(rules.reject):
        name = f"rs{index}"
        if rule.reduction == "none":
            values = _token_statistic(rule, log_ratio, excess)
            outside = _judge_tokens(rows, name, rule, values, mask, padding)
            if rules.weight.metrics == "verl":
                _held_sums(rows, name, rule, values, mask)
            keep = keep & ~outside if rule.scope == "token" else keep
        elif rule.statistic == "k2" and rule.reduction != "max":
            rows[f"{name}_sum"] = 0.5 * row_squares(log_ratio)
    if keep_out is not None:
        keep_out.copy_(keep)
    rows["num_kept"] = _count(keep)
    if rules.weight.level in (None, "token"):
        ratio = log_ratio.exp().mul_(mask)
        rows |= {"ratio": ratio.sum(-1), "ratio_sq": row_squares(ratio)}
        if weights_out is not None:
            _token_weights(rows, rules.weight, excess, ratio, mask, keep, padding, weights_out)
    return rows


def _judge_tokens(
    rows: Rows, name: str, rule: RejectRule, values: Tensor, mask: Tensor, padding: Tensor
) -> Tensor:
    """(B, T) bool: response tokens outside the rule's bounds."""
    centre = _centre(rule)
    outside = torch.zeros_like(mask)
    for side, bound in (("high", rule.upper), ("low", rule.lower)):
        rows[f"{name}_{side}"] = torch.zeros_like(rows["length"])
        if bound is not None:
            beyond = values > bound - centre if side == "high" else values < bound - centre
            beyond &= mask
            rows[f"{name}_{side}"] = _count(beyond)
            outside |= beyond
    rows |= {f"{name}_sum": values.sum(-1), f"{name}_sum_sq": row_squares(values)}
    rows[f"{name}_max"] = (values - padding).amax(-1) + centre
    rows[f"{name}_min"] = (values + padding).amin(-1) + centre
    return outside


def _held_sums(rows: Rows, name: str, rule: RejectRule, values: Tensor, mask: Tensor) -> None:
    """Sums of the statistic held within its bounds, of which verl logs the standard deviation."""
    centre = _centre(rule)
    lower = (0.0 if rule.lower is None else rule.lower) - centre
    held = torch.where(mask, values.clamp(lower, None if rule.upper is None else rule.upper - centre), 0.0)
    rows |= {f"{name}_held": held.sum(-1), f"{name}_held_sq": row_squares(held)}


def _centre(rule: RejectRule) -> float:
    """A ratio is kept as its distance from 1."""
    return 1.0 if rule.statistic == "ratio" else 0.0


def _token_statistic(rule: RejectRule, log_ratio: Tensor, excess: Tensor) -> Tensor:
    """The statistic per token, a ratio as its distance from 1; zero on padding."""
    if rule.statistic == "ratio":
        return excess
    if rule.statistic == "k1":
        return -log_ratio
    if rule.statistic == "k2":
        return 0.5 * log_ratio.square()
    return excess - log_ratio


def bound_weights(weights: Tensor, rule: WeightRule, centre: float = 0.0) -> Tensor:
    """Apply the bound to w − centre (any shape): `clip`, `truncate` or `mask` of `WeightRule`."""
    lower, upper = rule.lower - centre, rule.upper - centre
    if rule.bound == "mask":
        return torch.where((weights >= lower) & (weights <= upper), weights, -centre)
    return weights.clamp(min=lower if rule.bound == "clip" else None, max=upper)


def _token_weights(
    rows: Rows,
    rule: WeightRule,
    excess: Tensor,
    ratio: Tensor,
    mask: Tensor,
    keep: Tensor,
    padding: Tensor,
    weights_out: Tensor,
) -> None:
    """Bounded token weights into `weights_out`, and the row sums of what will be logged."""
    weights = bound_weights(ratio, rule)
    torch.mul(weights, keep, out=weights_out)
    applied = weights.mul_(mask) if rule.metrics == "verl" else weights_out
    rows |= {"weight_total": applied.sum(-1), "weight_total_sq": row_squares(applied)}
    bounded = bound_weights(excess, rule, centre=1.0)
    rows["ratio_high"] = _count(mask & (excess > rule.upper - 1.0))
    rows["ratio_low"] = _count(mask & (excess < _lower_edge(rule) - 1.0))
    kept = torch.where(keep, bounded, -1.0)
    logged = torch.where(mask, bounded if rule.metrics == "verl" else kept, 0.0)
    rows |= {"weight": logged.sum(-1), "weight_sq": row_squares(logged)}
    rows |= {"weight_min": (applied + padding).amin(-1), "weight_max": applied.amax(-1)}
    if rule.normalize:
        counted = weights * mask if rule.normalize_over == "all" else weights_out
        rows["norm"] = rows["weight_total"] if counted is applied else counted.sum(-1)


def _lower_edge(rule: WeightRule) -> float:
    """Where `ratio_fraction_low` starts: the lower bound, or 1/c for a truncation at c."""
    return 1.0 / rule.upper if rule.bound == "truncate" else rule.lower


def _count(where: Tensor) -> Tensor:
    """True cells per row (the dtype spares a conversion of the whole block)."""
    return where.sum(-1, dtype=torch.int32)


# --- sequences ------------------------------------------------------------------------------------


def _sequence_pass(
    blocks: list[Rows],
    mask: Tensor,
    rules: CorrectionRules,
    token_weights: Tensor | None,
    token_keep: Tensor | None,
) -> Correction:
    """Judge and weigh whole sequences, on (B,) vectors in float64."""
    names = list(blocks[0])  # one table (names, B), so that it is converted and cleaned in one go
    table = torch.cat([torch.stack(list(block.values())) for block in blocks], dim=1).double()
    rows: Rows = dict(zip(names, table, strict=True))
    length, nonempty = rows["length"], rows["length"] > 0
    nonfinite = nonempty & ~(rows["log_ratio"].isfinite() & rows["train_log_prob"].isfinite())
    finite = nonempty & ~nonfinite
    rows = dict(zip(names, torch.where(finite, table, 0.0), strict=True)) | {"length": length}

    keep = finite
    for index, rule in enumerate(rules.reject):
        failed = _judge_sequences(rows, f"rs{index}", rule)
        if rule.scope == "sequence":
            keep = keep & ~failed
    keep_mask = keep[:, None].expand_as(mask) if token_keep is None else token_keep & keep[:, None]
    rows["num_kept"] = torch.where(keep, rows["num_kept"], 0.0)

    weights = token_weights
    if token_weights is not None:
        token_weights.mul_(keep[:, None])
    elif rules.weight.level is not None:
        weights = _sequence_weights(rows, rules.weight, finite, keep)[:, None].expand_as(mask)
        if token_keep is not None:
            weights = weights * token_keep
    tally = build_tally(rows, rules, nonempty=nonempty, finite=finite, keep=keep)
    return Correction(weights, keep_mask, nonfinite, tally)


def _judge_sequences(rows: Rows, name: str, rule: RejectRule) -> Tensor:
    """(B,) bool: the sequence fails this criterion. Adds the statistic it was judged by."""
    if rule.reduction == "none":
        failed = rows[f"{name}_high"] + rows[f"{name}_low"] > 0
    else:
        value = _sequence_statistic(rows, name, rule)
        rows[f"{name}_value"] = value
        failed = torch.zeros_like(value, dtype=torch.bool)
        if rule.upper is not None:
            failed = failed | (value > rule.upper)
        if rule.lower is not None:
            failed = failed | (value < rule.lower)
    if rule.negative_advantage_only:
        failed = failed & (rows["advantage"] < 0)
    rows[f"{name}_failed"] = failed.double()
    return failed


def _sequence_statistic(rows: Rows, name: str, rule: RejectRule) -> Tensor:
    """(B,) float64: sum, mean or maximum over the sequence's tokens (a ratio: in log space)."""
    lowest, highest, length = rows["log_ratio_min"], rows["log_ratio_max"], rows["length"].clamp(min=1)
    if rule.reduction == "max":
        if rule.statistic == "ratio":
            return highest.exp()
        if rule.statistic == "k1":
            return -lowest
        if rule.statistic == "k2":
            return 0.5 * torch.maximum(lowest.square(), highest.square())
        # k3 is convex with its minimum at 0: its maximum is at one of the extremes.
        return torch.maximum(lowest.expm1() - lowest, highest.expm1() - highest)
    if rule.statistic == "ratio":
        log_ratio = rows["log_ratio"] / (length if rule.reduction == "mean" else 1.0)
        return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    if rule.statistic == "k1":
        total = -rows["log_ratio_clamped"]
    elif rule.statistic == "k2":
        total = rows[f"{name}_sum"]
    else:
        total = rows["excess"] - rows["log_ratio_clamped"]
    return total / length if rule.reduction == "mean" else total


def _sequence_weights(rows: Rows, rule: WeightRule, finite: Tensor, keep: Tensor) -> Tensor:
    """(B,) float32 bounded weights, 0.0 where the sequence is rejected."""
    length = rows["length"].clamp(min=1)
    log_weight = rows["log_ratio"] / (length if rule.level == "geometric" else 1.0)
    raw = log_weight.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).expm1()
    bounded = bound_weights(raw, rule, centre=1.0)
    rows |= {"raw": raw, "bounded": bounded}
    rows["ratio_high"] = (finite & (raw > rule.upper - 1.0)).double()
    rows["ratio_low"] = (finite & (raw < _lower_edge(rule) - 1.0)).double()
    return torch.where(keep, bounded + 1.0, 0.0).float()
