"""Rollout correction: importance weights and rejection between π_rollout and π_train.

Formulas of docs/explanation/rollout-correction.md: ratio → rejection → weight → sums → normalisation →
metrics. M sampled tokens form R responses (`CorrectionRules.unit`). Sums are of log-ratios as they are; a
log-ratio or a sum is clamped to ±20 before `exp`.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlctl.algos import verl_metrics
from rlctl.algos.losses import clamped_exp
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, RejectRule, WeightRule
from rlctl.algos.segments import HostSums, Moments, Segments, Sums, Units, divided, moments, ratio
from rlctl.registry import CORRECTION_WEIGHTS, REJECTION_CRITERIA, Registry, is_builtin


@dataclass(frozen=True)
class LogRatio:
    """log ρ of the M tokens of R responses, the input of weights and criteria.

    Responses without tokens or with a log-prob that is not finite are not among them.
    """

    token: Tensor  # (M,) float32, log ρ_t clamped to ±20
    total: Tensor  # (R,) float64, Σ_t log ρ_t, not clamped
    train: Tensor  # (M,) log π_train
    rollout: Tensor  # (M,) log π_rollout
    units: Units
    unit: Segments  # the tokens of each response
    advantages: Tensor | None = None  # (M,), set if it is needed
    age: Tensor | None = None  # (M,) optimizer updates since the weights that sampled it, set if it is needed

    @property
    def length(self) -> Tensor:
        """(R,) float64: number of tokens."""
        return self.unit.lengths.double()

    @property
    def gap(self) -> Tensor:
        """(M,): log ρ, not clamped, of which sums are made."""
        return self.train - self.rollout

    @property
    def mean(self) -> Tensor:
        """(R,) float64: log of the geometric mean of ρ."""
        return self.total / self.length

    @cached_property
    def ratio(self) -> Tensor:
        """(M,): ρ."""
        return self.token.exp()


@dataclass(frozen=True)
class Correction:
    """Result of rollout correction on a mini-batch or a part of one.

    Attributes:
        weights: (M,) float32, detached: after the bound, 0.0 where rejected, **not yet normalised** (the
            factor is computed over the whole mini-batch, see `normalization_factor`). Without a level 1.0
            where kept.
        keep: (M,) bool, tokens that are not rejected.
        nonfinite: (R,) bool, responses with a NaN or infinite log-prob (always rejected).
        saturated: (R,) bool, responses with |Σ log ρ| ≥ 20.
        sums: from which metrics and denominators are computed.
        raw, bounded: (U,) float64 weights of every token or segment of the level, before and after the bound,
            of the responses in `LogRatio`; without a level those of level `token`. None in a part.
    """

    weights: Tensor
    keep: Tensor
    nonfinite: Tensor
    saturated: Tensor
    sums: Sums
    raw: Tensor | None = None
    bounded: Tensor | None = None

    def of(self, tokens: Tensor, responses: Tensor) -> Correction:
        """Of the tokens and responses with these indices; `sums` stay those of all."""
        flags = self.nonfinite[responses], self.saturated[responses]
        return Correction(self.weights[tokens], self.keep[tokens], *flags, self.sums)


@torch.no_grad()
def correct(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    units: Units,
    rules: CorrectionRules,
    *,
    advantages: Tensor | None = None,
    age: Tensor | None = None,
) -> Correction:
    """Weights, rejection mask and sums of some responses.

    Args:
        log_probs: (M,) float32, log π_train of the sampled tokens (π_old or π_θ, by mode).
        rollout_log_probs: (M,) float32, log π_rollout of the same tokens.
        units: turns, sequences and episodes of these tokens.
        advantages, age: (M,), required if listed in `rules.needs`.

    Raises:
        ValueError: shapes or devices differ, log-probs are not float32 or float64, or a column that a rule
            needs is missing.
    """
    required = {"log_probs": log_probs, "rollout_log_probs": rollout_log_probs}
    _check_inputs(required, {"advantages": advantages, "age": age}, units, rules)
    responses = rules.responses(units)
    level = rules.segments(units, rules.weight.unit)
    gap = log_probs - rollout_log_probs
    total = responses.sum(gap)
    nonfinite = ~total.isfinite()
    saturated = ~nonfinite & (total.abs() >= LOG_RATIO_CLAMP)
    sums: Sums = {
        "tokens": responses.lengths.sum(),
        "sequences": (responses.lengths > 0).sum(),
        "units": (level.lengths > 0).sum(),
        "saturated": saturated.sum(),
    }
    used = ~nonfinite & (responses.lengths > 0)
    inside = None
    if not used.all():  # the others are left out of everything below
        inside = responses.spread(used)
        gap, log_probs, rollout_log_probs = (x[inside] for x in (gap, log_probs, rollout_log_probs))
        advantages, age = (None if x is None else x[inside] for x in (advantages, age))
        units = units.kept(inside).present()
        total = total[used]
    token = gap.clamp_(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    unit = rules.responses(units)
    log_ratio = LogRatio(
        token=token,
        total=total,
        train=log_probs,
        rollout=rollout_log_probs,
        units=units,
        unit=unit,
        advantages=advantages,
        age=age,
    )
    sums |= _gap_sums(log_ratio)
    keep = torch.ones_like(gap, dtype=torch.bool)
    for rule in rules.reject:
        rejected, of_rule = _rejected(log_ratio, rule, rules)
        keep &= ~rejected
        sums |= of_rule
    weights, raw, bounded, of_weights = _weighted(log_ratio, keep, rules)
    sums |= of_weights | _kept_sums(log_ratio, keep)
    if inside is not None:
        keep = torch.zeros_like(inside).masked_scatter(inside, keep)
        weights = weights.new_zeros(len(inside)).masked_scatter(inside, weights)
    sums = {name: value.double() for name, value in sums.items()}
    weights = keep.float() if rules.weight.level is None else weights
    return Correction(
        weights=weights,
        keep=keep,
        nonfinite=nonfinite,
        saturated=saturated,
        sums=sums,
        raw=raw,
        bounded=bounded,
    )


def _check_inputs(
    required: dict[str, Tensor], more: dict[str, Tensor | None], units: Units, rules: CorrectionRules
) -> None:
    for name, values in required.items():
        if values.dtype not in (torch.float32, torch.float64):
            message = f"{name} must be float32, not {values.dtype}: compute log_softmax in float32"
            raise ValueError(f"{message}; half precision is coarser than the mismatch")
    missing = [name for name in rules.needs if more[name] is None]
    if missing:
        raise ValueError(f"a rule of this correction needs `{missing[0]}`, and the batch has none")
    required = required | {name: column for name, column in more.items() if column is not None}
    for message in ("shape", "device"):
        each = {name: getattr(column, message) for name, column in required.items()}
        if len(set(each.values())) > 1:
            words = ", ".join(f"{name} {tuple(x) if message == 'shape' else x}" for name, x in each.items())
            raise ValueError(f"{message}s differ: {words}")
    shape = required["log_probs"].shape
    if shape != (units.sequence.total,):
        raise ValueError(f"{tuple(shape)} log-probs do not fit {units.sequence.total} tokens")


# --- rejection and weights --------------------------------------------------------------------------


def bound(weights: Tensor, rule: WeightRule) -> Tensor:
    """`clip`: clip(w, lower, upper). `truncate`: min(w, upper). `mask`: w in [lower, upper], else 0."""
    if rule.bound == "mask":
        return weights * ((weights >= rule.lower) & (weights <= rule.upper))
    return weights.clamp(min=rule.lower if rule.bound == "clip" else None, max=rule.upper)


def _evaluated(
    registry: Registry, name: str, log_ratio: LogRatio, params: Any, rules: CorrectionRules
) -> Tensor:
    """Values of a registered weight or criterion: one per token or segment of its unit."""
    registered = registry.part(name)
    own_log_ratio = (
        log_ratio if is_builtin(registered.function) else deepcopy(log_ratio)
    )  # it may change its input
    values: Tensor = registered.function(own_log_ratio, params)
    shape = (len(rules.segments(log_ratio.units, registered.unit)),)
    registry.check_returned(f"{name} (unit={registered.unit!r})", values, shape)
    return values if registered.unit == "token" else values.double()


def _rejected(log_ratio: LogRatio, rule: RejectRule, rules: CorrectionRules) -> tuple[Tensor, Sums]:
    """(M,) bool: tokens that one criterion rejects; sums of its statistic, and of what it rejects alone."""
    scope = rules.segments(log_ratio.units, rule.scope)
    is_reduced = rule.reduction in {"sum", "mean", "max"}
    if rule.statistic == "ratio" and rule.reduction in {"sum", "mean"}:  # in log space: geometric mean
        values = clamped_exp(getattr(scope, rule.reduction)(log_ratio.gap))
    else:
        values = _evaluated(REJECTION_CRITERIA, rule.statistic, log_ratio, rule.params, rules)
        values = getattr(scope, rule.reduction)(values) if is_reduced else values
    above = values > (math.inf if rule.upper is None else rule.upper)
    below = values < (-math.inf if rule.lower is None else rule.lower)
    rejected = above | below
    if rule.reduction == "none":
        rejected = scope.any(rejected)
    if rule.negative_advantage_only:
        rejected &= scope.sum(log_ratio.advantages) < 0
    tokens = scope.spread(rejected)
    name = f"reject.{rule.name}"
    sums = moments(name, values) | {
        f"{name}.above": above.sum(),
        f"{name}.below": below.sum(),
        f"{name}.masked_tokens": tokens.sum(),
        f"{name}.masked_sequences": log_ratio.unit.any(tokens).sum(),
    }
    if rules.weight.metrics:
        lengths = None if rule.reduction == "none" else scope.lengths
        sums |= verl_metrics.criterion_sums(name, values, lengths, rule)
    return tokens, sums


def _weighted(
    log_ratio: LogRatio, keep: Tensor, rules: CorrectionRules
) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Weights (M,) after bound and rejection; those of the level, raw and bounded; their sums.

    Without a level, of the weights that level `token` would have.
    """
    rule = rules.weight
    unit = log_ratio.unit
    level = rules.segments(log_ratio.units, rules.weight.unit)
    name = rule.level or "token"
    raw = clamped_exp(_evaluated(CORRECTION_WEIGHTS, name, log_ratio, rule.params, rules).double())
    bounded = bound(raw, rule)
    survives = level.any(keep)
    averaged = torch.ones_like(survives) if rule.normalize_over == "all" else survives
    sums = {"weight.normalizer": (bounded * averaged).sum(), "weight.normalizer_count": averaged.sum()}
    column = level.spread(bounded.float())
    weights = column * keep
    # What `rollout_is_*` describe: the weights of the loss, unless a convention ignores rejection.
    described, shown = (weights, bounded * survives) if rule.metrics is None else (column, bounded)
    of_responses = raw if level is unit else unit.mean(level.spread(raw))
    multiplicity = None if rule.by_token else level.lengths
    sums |= moments("raw.token", raw, multiplicity) | moments("weight.token", described)
    sums |= moments("raw.sequence", of_responses)
    sums |= moments("weight.sequence", shown if level is unit else unit.mean(described))
    if not rule.by_token:
        sums |= moments("raw.unit", raw) | moments("weight.unit", shown)
    sums |= {
        "weight.above": (raw > rule.upper).sum(),
        "weight.below": (raw < rule.lower_edge).sum(),
        "weight.sequences_above": (of_responses > rule.upper).sum(),
        "weight.sequences_below": (of_responses < rule.lower_edge).sum(),
    }
    return weights, raw, bounded, sums


def _kept_sums(log_ratio: LogRatio, keep: Tensor) -> Sums:
    """Numbers of tokens and responses that are finite, kept, and kept as a whole."""
    lengths = log_ratio.unit.lengths
    kept = log_ratio.unit.sum(keep)
    return {
        "finite_tokens": lengths.sum(),
        "finite_sequences": (lengths > 0).sum(),
        "kept_tokens": kept.sum(),
        "kept_sequences": (kept > 0).sum(),
        "whole_sequences": (kept == lengths).sum(),
    }


def _gap_sums(log_ratio: LogRatio) -> Sums:
    """Distances between the two policies, independent of the rules; a mean is a metric of the same name."""
    token = log_ratio.token.double()
    total = log_ratio.total
    excess = token.expm1()  # ρ − 1, exact where ρ is near 1
    sums = {
        "per_token.kl": -total.sum(),
        "per_token.chi2_token": excess @ excess + 2.0 * excess.sum(),
        "per_token.k3_kl": excess.sub_(token).sum(),
        "per_response.chi2_seq": (2.0 * total.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).expm1().sum(),
    }
    del token, excess
    log_ppl = -log_ratio.unit.mean(log_ratio.train)
    difference = -log_ratio.mean  # rollout's mean log-prob − trainer's
    sums |= moments("log_ppl_diff", difference) | {
        "per_response.training_log_ppl": log_ppl.sum(),
        "per_response.training_ppl": log_ppl.exp().sum(),
        "per_response.rollout_log_ppl": (log_ppl - difference).sum(),
        "per_response.rollout_ppl": (log_ppl - difference).exp().sum(),
        "per_response.log_ppl_abs_diff": difference.abs().sum(),
        "per_response.ppl_ratio": difference.exp().sum(),
    }
    train, rollout = (
        column.to(torch.float64, copy=True).exp_() for column in (log_ratio.train, log_ratio.rollout)
    )
    sums |= {"prob.train": train.sum(), "prob.train_squares": train @ train}
    sums |= {"prob.rollout": rollout.sum(), "prob.rollout_squares": rollout @ rollout}
    return sums | moments("prob.distance", train.sub_(rollout).abs_())


# --- on the host ----------------------------------------------------------------------------------


def normalization_factor(sums: HostSums, rules: CorrectionRules) -> float:
    """Mean weight of the whole mini-batch, the divisor of its weights; 1.0 without normalisation."""
    if rules.weight.level is None or not rules.weight.normalize:
        return 1.0
    return ratio(sums["weight.normalizer"], sums["weight.normalizer_count"]) or 1.0


def normalized(sums: HostSums, factor: float, rules: CorrectionRules) -> HostSums:
    """The sums after dividing every weight of this mini-batch by the normalisation factor."""
    if factor == 1.0 or rules.weight.metrics is not None:
        return sums
    names = [name.removesuffix(".xx") for name in sums if name.startswith("weight.") and name.endswith(".xx")]
    return sums | {key: value for name in names for key, value in divided(sums, name, factor).items()}


def correction_metrics(sums: HostSums, rules: CorrectionRules) -> HostSums:
    """Every `rollout_corr/*` and `training/rollout_*` metric; definitions in `rlctl.metric_names`.

    Without a finite token there is nothing to average: then only counts and rejected fractions.
    """
    rule = rules.weight
    all_tokens = sums["tokens"]
    all_responses = sums["sequences"]
    tokens = sums["finite_tokens"]
    responses = sums["finite_sequences"]
    metrics = {
        "nonfinite_sequences": all_responses - responses,
        "saturated_sequences": sums["saturated"],
        "rollout_rs_masked_fraction": ratio(all_tokens - sums["kept_tokens"], all_tokens),
        "rollout_rs_seq_masked_fraction": ratio(all_responses - sums["whole_sequences"], all_responses),
    }
    if not tokens:
        return {f"rollout_corr/{name}": value for name, value in metrics.items()}
    for prefix, count in (("per_token.", tokens), ("per_response.", responses)):
        metrics |= {
            k.removeprefix(prefix): value / count for k, value in sums.items() if k.startswith(prefix)
        }
    difference = Moments.read(sums, "log_ppl_diff")
    metrics["log_ppl_diff"] = difference.mean
    metrics |= {"log_ppl_diff_max": difference.max, "log_ppl_diff_min": difference.min}
    for criterion in rules.reject:
        metrics |= _criterion_metrics(sums, criterion, rules)
    metrics |= _weight_metrics(sums, "raw", rule, "rollout_is_raw_")
    if rule.level is not None:
        metrics |= _weight_metrics(sums, "weight", rule, "rollout_is_")
        units = sums["raw.token.n" if rule.by_token else "raw.unit.n"]
        for side, where in (("high", "above"), ("low", "below")):
            metrics[f"rollout_is_ratio_fraction_{side}"] = ratio(sums[f"weight.{where}"], units)
            metrics[f"rollout_is_seq_fraction_{side}"] = ratio(sums[f"weight.sequences_{where}"], responses)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()} | _probability_metrics(sums)


def parts_with_nan(sums: HostSums, rules: CorrectionRules) -> list[str]:
    """The weight and the criteria that returned NaN for responses with finite log-probs, for a message."""
    names = [f"rejection criterion {r.name}" for r in rules.reject if math.isnan(sums[f"reject.{r.name}.x"])]
    return names + ([f"correction weight {rules.weight.level}"] if math.isnan(sums["raw.token.x"]) else [])


def _weight_metrics(sums: HostSums, of: str, rule: WeightRule, prefix: str) -> HostSums:
    """Metrics of `raw` weights, or of `weight`: those of the loss, 0 for responses that are not finite."""

    def read(level: str) -> Moments:
        found = Moments.read(sums, f"{of}.{level}")
        return found if of == "raw" else found.with_zeros(sums[f"{level}s"] - found.count)

    token = read("token")
    sequence = read("sequence")
    unit = token if rule.by_token else read("unit")
    metrics = {"mean": unit.mean, "std": unit.std, "max": unit.max, "min": unit.min}
    metrics |= {"eff_sample_size": unit.ess, "eff_sample_size_token": token.ess, "seq_mean": sequence.mean}
    metrics |= {"seq_std": sequence.sample_std, "seq_max": sequence.max, "seq_min": sequence.min}
    metrics["seq_max_deviation"] = max(abs(sequence.max - 1.0), abs(sequence.min - 1.0))
    if rule.metrics and of == "weight":
        metrics |= verl_metrics.weight_metrics(
            token, None if rule.by_token else Moments.read(sums, "raw.unit")
        )
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def _criterion_metrics(sums: HostSums, rule: RejectRule, rules: CorrectionRules) -> HostSums:
    name = f"reject.{rule.name}"
    values = Moments.read(sums, name)
    metrics = {"mean": values.mean, "max": values.max, "min": values.min, "std": values.std}
    if rules.weight.metrics:
        metrics["mean"], metrics["std"] = verl_metrics.criterion_moments(sums, name)
    metrics["fraction_high"] = ratio(sums[f"{name}.above"], values.count)
    metrics["fraction_low"] = ratio(sums[f"{name}.below"], values.count)
    metrics["masked_fraction"] = ratio(sums[f"{name}.masked_tokens"], sums["finite_tokens"])
    metrics["seq_masked_fraction"] = ratio(sums[f"{name}.masked_sequences"], sums["finite_sequences"])
    return {f"rollout_rs_{rule.name}_{key}": value for key, value in metrics.items()}


def _probability_metrics(sums: HostSums) -> HostSums:
    distance = Moments.read(sums, "prob.distance")
    n = sums["finite_tokens"]
    totals, squares = ([sums[f"prob.{x}{end}"] for x in ("train", "rollout")] for end in ("", "_squares"))
    covariance = n * 0.5 * (sum(squares) - distance.squares) - totals[0] * totals[1]  # from (p − q)²
    spreads = [n * xx - x**2 for x, xx in zip(totals, squares, strict=True)]
    # A smaller spread than this is rounding error. A constant has no correlation; 1.0 is reported because
    # 0.0 would mean disagreement.
    constant = any(spread <= 1e-13 * n * xx for spread, xx in zip(spreads, squares, strict=True))
    pearson = 1.0 if constant else covariance / math.sqrt(spreads[0] * spreads[1])
    return {
        "training/rollout_probs_diff_mean": distance.mean,
        "training/rollout_probs_diff_max": distance.max,
        "training/rollout_probs_diff_std": distance.sample_std,
        "training/rollout_actor_probs_pearson_corr": min(max(pearson, -1.0), 1.0),
    }
