"""Rollout correction: importance weights and rejection between π_rollout and π_train.

Formulas of docs/explanation/rollout-correction.md, in its order: ratio → weight → rejection → normalisation →
sums → metrics. M sampled tokens form R responses (`CorrectionRules.unit`). Log-ratios, and sums of them, are
clamped to ±20 before `exp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlctl.algos import verl_metrics
from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, RejectRule, WeightRule
from rlctl.algos.segments import LARGEST, HostSums, Moments, Segments, Sums, Units, divided, moments, ratio
from rlctl.registry import CORRECTION_WEIGHTS, REJECTION_CRITERIA, Registry, is_builtin


@dataclass(frozen=True)
class LogRatio:
    """log ρ of the M tokens of finite responses, the input of weights and criteria."""

    token: Tensor  # (M,) float32, log ρ_t clamped to ±20
    total: Tensor  # (R,) float64, Σ_t log ρ_t, not clamped
    train: Tensor  # (M,) log π_train
    rollout: Tensor  # (M,) log π_rollout
    units: Units
    unit: Segments  # the responses; one that is not finite has no tokens here
    advantages: Tensor | None = None  # (M,), set if it is needed
    age: Tensor | None = None  # (M,) optimizer updates since the weights that sampled it, set if it is needed

    @property
    def length(self) -> Tensor:
        """(R,) float64: number of tokens."""
        return self.unit.lengths.double()

    @property
    def mean(self) -> Tensor:
        """(R,) float64: log of the geometric mean of ρ."""
        return self.total / self.length.clamp(min=1)

    @cached_property
    def ratio(self) -> Tensor:
        """(M,): ρ."""
        return self.token.exp()

    def copied(self) -> LogRatio:
        """A copy whose tensors can be changed."""
        given = {part.name: getattr(self, part.name) for part in fields(self)}
        copies: dict[str, Any] = {name: x.clone() for name, x in given.items() if isinstance(x, Tensor)}
        return replace(self, **copies)


@dataclass(frozen=True)
class Correction:
    """Result of rollout correction on a mini-batch or a part of one.

    Attributes:
        weights: (M,) float32, detached: after the bound, 0.0 where rejected, **not yet normalised** (the
            factor is computed over the whole mini-batch, see `normalization_factor`). None if the rule has no
            level.
        keep: (M,) bool, tokens that are not rejected.
        nonfinite: (R,) bool, responses with a NaN or infinite log-prob (always rejected).
        saturated: (R,) bool, responses with |Σ log ρ| ≥ 20.
        sums: from which metrics and denominators are computed.
        raw, bounded: (U,) weights of every token or segment of the level, before and after the bound; of
            finite responses only. None without a level.
    """

    weights: Tensor | None
    keep: Tensor
    nonfinite: Tensor
    saturated: Tensor
    sums: Sums
    raw: Tensor | None = None
    bounded: Tensor | None = None

    def of(self, tokens: Tensor, responses: Tensor) -> Correction:
        """Of the tokens and responses with these indices; `sums` stay those of all."""
        weights = None if self.weights is None else self.weights[tokens]
        flags = self.nonfinite[responses], self.saturated[responses]
        return Correction(weights, self.keep[tokens], *flags, self.sums)


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
        ValueError: as `check_inputs`.
    """
    check_inputs(log_probs, rollout_log_probs, units, rules, advantages, age)
    unit, all_units = rules.segments(units, "sequence"), units
    gap, train, rollout = log_probs - rollout_log_probs, log_probs, rollout_log_probs
    total = unit.sum(gap)
    nonfinite, inside = ~total.isfinite(), None
    if nonfinite.any():  # their tokens are left out of everything below
        inside = unit.spread(~nonfinite)
        gap, train, rollout = gap[inside], train[inside], rollout[inside]
        advantages, age = (None if x is None else x[inside] for x in (advantages, age))
        units, total = units.kept(inside), torch.where(nonfinite, 0.0, total)
    gap = gap.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    log_ratio = LogRatio(
        gap, total, train, rollout, units, rules.segments(units, "sequence"), advantages, age
    )
    results = [_checked(log_ratio, rule, rules) for rule in rules.reject]
    keep = torch.ones_like(gap, dtype=torch.bool)
    for _, _, _, rejected, segments in results:
        keep &= ~(rejected if segments is None else segments.spread(rejected))
    sums = _gap_sums(log_ratio) | _counts(log_ratio, all_units, keep, rules)
    for result, rule in zip(results, rules.reject, strict=True):
        sums |= _criterion_sums(log_ratio, result, rule, rules)
    weights, raw, bounded, of_weights = _weighted(log_ratio, all_units, keep, rules)
    if inside is not None:
        keep = torch.zeros_like(inside).masked_scatter(inside, keep)
        if weights is not None:
            weights = weights.new_zeros(len(inside)).masked_scatter(inside, weights)
    saturated = total.abs() >= LOG_RATIO_CLAMP
    sums = {name: value.double() for name, value in (sums | of_weights).items()}
    if rules.weight.level is None:
        weights = raw = bounded = None
    return Correction(weights, keep, nonfinite, saturated, sums, raw, bounded)


def check_inputs(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    units: Units,
    rules: CorrectionRules,
    advantages: Tensor | None = None,
    age: Tensor | None = None,
) -> None:
    """Checks that columns can be corrected.

    Raises:
        ValueError: shapes or devices differ, log-probs are not float32 or float64, or a column that a rule
            needs is missing.
    """
    given = {"log_probs": log_probs, "rollout_log_probs": rollout_log_probs}
    for name, values in given.items():
        if values.dtype not in (torch.float32, torch.float64):
            what = f"{name} must be float32, not {values.dtype}: compute log_softmax in float32"
            raise ValueError(f"{what}; half precision is coarser than the mismatch")
    for name, column in (("advantages", advantages), ("age", age)):
        if column is not None:
            given[name] = column
        elif name in rules.needs:
            raise ValueError(f"a rule of this correction needs `{name}`, and the batch has none")
    for what, found in (
        ("shapes", [tuple(x.shape) for x in given.values()]),
        ("devices", [x.device for x in given.values()]),
    ):
        if len(set(found)) > 1:
            each = ", ".join(f"{name} {value}" for name, value in zip(given, found, strict=True))
            raise ValueError(f"{what} differ: {each}")
    if log_probs.shape != (units.sequence.total,):
        raise ValueError(f"{tuple(log_probs.shape)} log-probs do not fit {units.sequence.total} tokens")


# --- weights and rejection --------------------------------------------------------------------------


def clamped_exp(log_weight: Tensor) -> Tensor:
    """exp(clip(log w, ±20))."""
    return log_weight.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def bound(weights: Tensor, rule: WeightRule) -> Tensor:
    """`clip`: clip(w, lower, upper). `truncate`: min(w, upper). `mask`: w in [lower, upper], else 0."""
    if rule.bound == "mask":
        return weights * ((weights >= rule.lower) & (weights <= rule.upper))
    return weights.clamp(min=rule.lower if rule.bound == "clip" else None, max=rule.upper)


def _evaluated(
    registry: Registry, name: str, log_ratio: LogRatio, params: Any, rules: CorrectionRules
) -> Tensor:
    """Values of a registered weight or criterion: (M,), or float64 per segment of its unit, 0.0 if empty."""
    part = registry.part(name)
    given = log_ratio if is_builtin(part.function) else log_ratio.copied()  # it may change its input
    values: Tensor = part.function(given, params)
    if part.unit == "token":
        registry.check_returned(f"{name} (unit='token')", values, tuple(log_ratio.token.shape))
        return values
    lengths: Tensor = rules.segments(log_ratio.units, part.unit).lengths
    registry.check_returned(f"{name} (unit={part.unit!r})", values, tuple(lengths.shape))
    return torch.where(lengths > 0, values.double(), 0.0)


#: The statistic per token or segment, values over the upper bound, under the lower one, what is rejected
#: (bool, per token or segment), and its segments; None: tokens are rejected one by one.
_Result = tuple[Tensor, Tensor, Tensor, Tensor, Segments | None]


def _checked(log_ratio: LogRatio, rule: RejectRule, rules: CorrectionRules) -> _Result:
    segments = None if rule.scope == "token" else rules.segments(log_ratio.units, rule.scope)
    if rule.reduction in {"none", "given"}:
        values = _evaluated(REJECTION_CRITERIA, rule.statistic, log_ratio, rule.params, rules)
    elif segments is not None and rule.statistic == "ratio" and rule.reduction != "max":
        log_sum = segments.sum(log_ratio.train - log_ratio.rollout)  # product, or geometric mean
        by = segments.lengths.clamp(min=1) if rule.reduction == "mean" else 1.0
        values = clamped_exp(log_sum / by)
    else:
        assert segments is not None
        of_tokens = _evaluated(REJECTION_CRITERIA, rule.statistic, log_ratio, rule.params, rules)
        reduced = getattr(segments, rule.reduction)(of_tokens)
        values = torch.where(segments.lengths > 0, reduced, 0.0)
    inside = True if rule.reduction == "none" or segments is None else segments.lengths > 0
    none = torch.zeros_like(values, dtype=torch.bool)
    above = none if rule.upper is None else (values > rule.upper) & inside
    below = none if rule.lower is None else (values < rule.lower) & inside
    rejected = above | below
    if segments is not None and rule.reduction == "none":
        rejected = segments.any(rejected)
    if rule.negative_advantage_only and segments is not None and log_ratio.advantages is not None:
        rejected = rejected & (segments.sum(log_ratio.advantages) < 0)
    return values, above, below, rejected, segments


def _weighted(
    log_ratio: LogRatio, all_units: Units, keep: Tensor, rules: CorrectionRules
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Sums]:
    """Weights (M,) after bound and rejection; raw and bounded ones of the level; and their sums."""
    rule, unit = rules.weight, log_ratio.unit
    log_weight, segments = log_ratio.token, None
    if rule.level is not None:
        log_weight = _evaluated(CORRECTION_WEIGHTS, rule.level, log_ratio, rule.params, rules)
        if not rule.by_token:
            segments = rules.segments(log_ratio.units, CORRECTION_WEIGHTS.part(rule.level).unit)
    raw = clamped_exp(log_weight.double())
    is_response, has_tokens = segments is unit, unit.lengths > 0
    of_responses = raw if is_response else unit.mean(raw if segments is None else segments.spread(raw))
    sums = moments("raw.token", raw, None if segments is None else segments.lengths)
    sums |= moments("raw.sequence", of_responses, has_tokens)
    bounded = bound(raw, rule)
    column = (bounded if segments is None else segments.spread(bounded)).float()
    applied = column * keep
    described = applied if rule.metrics is None else column
    everything = rules.segments(all_units, "sequence")
    sums |= moments("weight.token", described, zeros=everything.total - len(keep))
    # Over tokens, or over the segments of the level: which weights count in the normalisation, and how often.
    is_there = None if segments is None else segments.lengths > 0
    survives = keep if segments is None else segments.any(keep)
    over = (
        survives
        if rule.normalize_over == "survivors"
        else (torch.ones_like(keep) if is_there is None else is_there)
    )
    above, below = raw > rule.upper, raw < rule.lower_edge
    values = unit.sum(described) / unit.lengths.clamp(min=1)
    if segments is not None and is_there is not None:
        above, below = above & is_there, below & is_there
        shown = bounded * (survives if rule.metrics is None else is_there)
        values = shown if is_response else values
        of_level = rules.segments(all_units, CORRECTION_WEIGHTS.part(str(rule.level)).unit)
        lost = (of_level.lengths > 0).sum() - is_there.sum()
        sums |= moments("raw.unit", raw, is_there) | moments("weight.unit", shown, is_there, zeros=lost)
    sums |= moments(
        "weight.sequence", values, has_tokens, zeros=(everything.lengths > 0).sum() - has_tokens.sum()
    )
    sums |= {
        "weight.above": above.sum(),
        "weight.below": below.sum(),
        "weight.sequences_above": ((of_responses > rule.upper) & has_tokens).sum(),
        "weight.sequences_below": ((of_responses < rule.lower_edge) & has_tokens).sum(),
        "weight.normalizer": (bounded * over).sum(),
        "weight.normalizer_count": over.sum(),
    }
    return applied, raw, bounded, sums


# --- sums on the device -----------------------------------------------------------------------------


def _counts(log_ratio: LogRatio, all_units: Units, keep: Tensor, rules: CorrectionRules) -> Sums:
    """Tokens and responses: of all, of those that are finite, kept, and rejected."""
    unit, lengths = log_ratio.unit, rules.segments(all_units, "sequence").lengths
    kept = unit.sum(keep)
    return {
        "tokens": lengths.sum(),
        "sequences": (lengths > 0).sum(),
        "finite_tokens": unit.lengths.sum(),
        "finite_sequences": (unit.lengths > 0).sum(),
        "kept_tokens": kept.sum(),
        "kept_sequences": (kept > 0).sum(),
        "rejected_sequences": (kept < lengths).sum(),
        "saturated": (log_ratio.total.abs() >= LOG_RATIO_CLAMP).sum(),
    }


def _gap_sums(log_ratio: LogRatio) -> Sums:
    """Distances between the two policies, independent of the rules."""
    token, there = log_ratio.token.double(), log_ratio.unit.lengths > 0
    excess = token.expm1()  # ρ − 1, exact where ρ is near 1
    log_ppl = -log_ratio.unit.mean(log_ratio.train)
    difference = -log_ratio.mean  # rollout's mean log-prob − trainer's
    probs = [x.double().exp() for x in (log_ratio.train, log_ratio.rollout)]
    distance = (probs[0] - probs[1]).abs()
    sums = {
        "log_ratio": log_ratio.total.sum(),
        "k3": (excess - token).sum(),
        "chi2_token": excess @ excess + 2.0 * excess.sum(),
        "chi2_sequence": (2.0 * log_ratio.total.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)).expm1().sum(),
        "training_log_ppl": log_ppl.sum(),
        "training_ppl": (log_ppl.exp() * there).sum(),
        "rollout_log_ppl": (log_ppl - difference).sum(),
        "rollout_ppl": ((log_ppl - difference).exp() * there).sum(),
        "log_ppl_abs_diff": difference.abs().sum(),
        "ppl_ratio": (difference.exp() * there).sum(),
    }
    sums |= moments("log_ppl_diff", difference, there)
    for name, values in (("train", probs[0]), ("rollout", probs[1]), ("distance", distance)):
        sums |= {f"prob.{name}": values.sum(), f"prob.{name}_squares": values @ values}
    return sums | {f"prob.distance{LARGEST}": distance.amax() if len(distance) else distance.sum()}


def _criterion_sums(log_ratio: LogRatio, result: _Result, rule: RejectRule, rules: CorrectionRules) -> Sums:
    """One criterion's statistic, its bound violations, and what it rejects without the others."""
    values, above, below, rejected, segments = result
    name, by_token = f"reject.{rule.name}", rule.reduction == "none"
    of_values = None if by_token or segments is None else segments.lengths
    tokens = rejected if segments is None else segments.spread(rejected)
    sums = moments(name, values, None if of_values is None else of_values > 0) | {
        f"{name}.units": torch.tensor(len(values), device=values.device)
        if of_values is None
        else (of_values > 0).sum(),
        f"{name}.above": above.sum(),
        f"{name}.below": below.sum(),
        f"{name}.masked_tokens": tokens.sum(),
        f"{name}.masked_sequences": log_ratio.unit.any(tokens).sum(),
    }
    return sums | (verl_metrics.criterion_sums(name, values, of_values, rule) if rules.weight.metrics else {})


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
    rule, tokens, sequences = rules.weight, sums["finite_tokens"], sums["finite_sequences"]
    found = {
        "nonfinite_sequences": sums["sequences"] - sequences,
        "saturated_sequences": sums["saturated"],
        "rollout_rs_masked_fraction": ratio(sums["tokens"] - sums["kept_tokens"], sums["tokens"]),
        "rollout_rs_seq_masked_fraction": ratio(sums["rejected_sequences"], sums["sequences"]),
    }
    if not tokens:
        return {f"rollout_corr/{name}": value for name, value in found.items()}
    difference = Moments.read(sums, "log_ppl_diff")
    found |= {
        "log_ppl_diff": difference.mean,
        "log_ppl_diff_max": difference.max,
        "log_ppl_diff_min": difference.min,
    }
    found |= {name: ratio(sums[name], sequences) for name in _PER_RESPONSE}
    found |= {"kl": -ratio(sums["log_ratio"], tokens), "k3_kl": ratio(sums["k3"], tokens)}
    found |= {
        "chi2_token": ratio(sums["chi2_token"], tokens),
        "chi2_seq": ratio(sums["chi2_sequence"], sequences),
    }
    for criterion in rules.reject:
        found |= _criterion_metrics(sums, criterion, rules)
    found |= _weight_metrics(sums, "raw", rule, "rollout_is_raw_")
    if rule.level is not None:
        found |= _weight_metrics(sums, "weight", rule, "rollout_is_")
        found |= verl_metrics.weight_metrics(sums, rule) if rule.metrics else {}
        units = tokens if rule.by_token else sums["raw.unit.n"]
        for side, where in (("high", "above"), ("low", "below")):
            found[f"rollout_is_ratio_fraction_{side}"] = ratio(sums[f"weight.{where}"], units)
            found[f"rollout_is_seq_fraction_{side}"] = ratio(sums[f"weight.sequences_{where}"], sequences)
    return {f"rollout_corr/{name}": value for name, value in found.items()} | _probability_metrics(sums)


_PER_RESPONSE = (
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_abs_diff",
    "ppl_ratio",
)


def parts_with_nan(sums: HostSums, rules: CorrectionRules) -> list[str]:
    """The weight and the criteria that returned NaN for responses with finite log-probs, for a message."""
    names = [f"rejection criterion {r.name}" for r in rules.reject if math.isnan(sums[f"reject.{r.name}.x"])]
    return names + ([f"correction weight {rules.weight.level}"] if math.isnan(sums["raw.token.x"]) else [])


def _weight_metrics(sums: HostSums, of: str, rule: WeightRule, prefix: str) -> HostSums:
    """Metrics `mean` to `seq_max_deviation`; over tokens at token level, else over the level's segments."""
    token, sequence = Moments.read(sums, f"{of}.token"), Moments.read(sums, f"{of}.sequence")
    unit = token if rule.by_token else Moments.read(sums, f"{of}.unit")
    deviation = max(abs(sequence.max - 1.0), abs(sequence.min - 1.0)) if sequence.count else 0.0
    found = {"mean": unit.mean, "std": unit.std, "max": unit.max, "min": unit.min}
    found |= {"eff_sample_size": unit.ess, "eff_sample_size_token": token.ess, "seq_mean": sequence.mean}
    found |= {"seq_std": sequence.sample_std, "seq_max": sequence.max, "seq_min": sequence.min}
    return {f"{prefix}{name}": value for name, value in found.items()} | {
        f"{prefix}seq_max_deviation": deviation
    }


def _criterion_metrics(sums: HostSums, rule: RejectRule, rules: CorrectionRules) -> HostSums:
    name, prefix = f"reject.{rule.name}", f"rollout_rs_{rule.name}_"
    values, units = Moments.read(sums, name), sums[f"{name}.units"]
    mean, std = values.mean, values.std
    if rules.weight.metrics:
        mean, std = verl_metrics.criterion_moments(sums, name)
    return {
        f"{prefix}mean": mean,
        f"{prefix}max": values.max,
        f"{prefix}min": values.min,
        f"{prefix}std": std,
        f"{prefix}fraction_high": ratio(sums[f"{name}.above"], units),
        f"{prefix}fraction_low": ratio(sums[f"{name}.below"], units),
        f"{prefix}masked_fraction": ratio(sums[f"{name}.masked_tokens"], sums["finite_tokens"]),
        f"{prefix}seq_masked_fraction": ratio(sums[f"{name}.masked_sequences"], sums["finite_sequences"]),
    }


def _probability_metrics(sums: HostSums) -> HostSums:
    n = sums["finite_tokens"]
    p, q, d = (
        Moments(n, sums[f"prob.{x}"], sums[f"prob.{x}_squares"], 0.0, 0.0)
        for x in ("train", "rollout", "distance")
    )
    covariance = n * 0.5 * (p.squares + q.squares - d.squares) - p.total * q.total  # from (p − q)²
    spreads = [n * x.squares - x.total**2 for x in (p, q)]
    # A smaller spread than this is rounding error. A constant has no correlation; 1.0 is reported because
    # 0.0 would mean disagreement.
    constant = any(spread <= 1e-13 * n * x.squares for spread, x in zip(spreads, (p, q), strict=True))
    pearson = 1.0 if constant else covariance / math.sqrt(spreads[0] * spreads[1])
    return {
        "training/rollout_probs_diff_mean": d.mean,
        "training/rollout_probs_diff_max": sums[f"prob.distance{LARGEST}"],
        "training/rollout_probs_diff_std": d.sample_std,
        "training/rollout_actor_probs_pearson_corr": min(max(pearson, -1.0), 1.0),
    }
