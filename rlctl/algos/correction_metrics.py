"""Correction metrics from mergeable sums: reduce first, divide once.

`Tally` holds sums and maxima of one part of a mini-batch, on the device. Parts add up; two
collectives merge ranks; one transfer brings everything to the host as a `HostTally`, whose
`metrics` are those of the whole, never an average of the parts' figures.

Weights and ratios are summed as distances from 1, so that variances near ρ = 1 survive rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, RejectRule

#: Per-row sums, each (B,).
Rows = dict[str, Tensor]


# --- on the device --------------------------------------------------------------------------------


def policy_gap_sums(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Rows:
    """Row sums comparing the two policies' probabilities of the sampled tokens, all (B, T) in."""
    train = torch.where(mask, log_probs, 0.0)
    rows: Rows = {"train_log_prob": train.sum(-1)}
    train_prob = train.exp_().mul_(mask)
    rollout_prob = torch.where(mask, rollout_log_probs, -torch.inf).exp_()
    dot = torch.linalg.vecdot
    rows |= {"q": train_prob.sum(-1), "qq": dot(train_prob, train_prob)}
    rows |= {"p": rollout_prob.sum(-1), "pp": dot(rollout_prob, rollout_prob)}
    rows["pq"] = dot(train_prob, rollout_prob)
    gap = train_prob.sub_(rollout_prob).abs_()
    rows |= {"gap": gap.sum(-1), "gap_sq": dot(gap, gap), "gap_max": gap.amax(-1)}
    return rows


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums and maxima on the device, all () float64, under fixed names.

    Minima are kept as maxima of the negated value, so that a whole tally merges with one sum and
    one maximum.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    def __add__(self, other: Tally) -> Tally:
        """The tally of both parts together."""
        return Tally(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: torch.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )

    def pack(self) -> tuple[Tensor, Tensor]:
        """All sums and all maxima, each one float64 vector, to be reduced over ranks."""
        return torch.stack(list(self.sums.values())), torch.stack(list(self.maxima.values()))

    def to_host(self, packed: tuple[Tensor, Tensor] | None = None) -> HostTally:
        """Bring everything (or what `pack` gave, after reduction) over in one transfer."""
        sums, maxima = packed or self.pack()
        values = torch.cat([sums, maxima]).tolist()
        return HostTally(
            dict(zip(self.sums, values[: len(sums)], strict=True)),
            dict(zip(self.maxima, values[len(sums) :], strict=True)),
        )


def build_tally(
    rows: Rows, rules: CorrectionRules, *, nonempty: Tensor, finite: Tensor, keep: Tensor
) -> Tally:
    """Add the rows up.

    Args:
        rows: row sums in float64, zero for sequences with non-finite log-probs.
        nonempty, finite, keep: (B,) bool: has response tokens; and finite log-probs; and survives
            sequence-scoped rejection.
    """
    builder = _Builder()
    length, num_kept = rows["length"], rows["num_kept"]
    survives = keep & (num_kept > 0)
    builder.sums |= {
        "tokens": length.sum(),
        "sequences": nonempty.double().sum(),
        "finite_tokens": length[finite].sum(),
        "finite_sequences": finite.double().sum(),
        "kept_tokens": num_kept.sum(),
        "kept_sequences": survives.double().sum(),
        "rejected_sequences": (nonempty & (num_kept < length)).double().sum(),
        "saturated": (finite & (rows["log_ratio"].abs() >= LOG_RATIO_CLAMP)).double().sum(),
    }
    _gap_sums(builder, rows, finite)
    _weight_sums(builder, rows, rules, nonempty, finite, keep, survives)
    for index, rule in enumerate(rules.reject):
        _criterion_sums(builder, rows, f"rs{index}", rule, finite)
    return Tally(builder.sums, builder.maxima)


class _Builder:
    """Names for the sums of one family of values: count, Σx, Σx², max, −min."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def family(
        self, name: str, count: Tensor, total: Tensor, squares: Tensor, high: Tensor, low: Tensor, who: Tensor
    ) -> None:
        """Row vectors (B,): `who` takes part; `count` values in the row, their sums and extremes."""
        zero, never = torch.zeros((), dtype=torch.float64, device=who.device), -math.inf
        self.sums[f"{name}.n"] = torch.where(who, count, zero).sum()
        self.sums[f"{name}.s1"] = torch.where(who, total, zero).sum()
        self.sums[f"{name}.s2"] = torch.where(who, squares, zero).sum()
        self.maxima[f"{name}.max"] = torch.where(who, high, never).amax()
        self.maxima[f"{name}.min"] = torch.where(who, -low, never).amax()

    def per_sequence(self, name: str, values: Tensor, who: Tensor, centre: float = 0.0) -> None:
        """One value per sequence."""
        at = values + centre
        self.family(name, torch.ones_like(values), values, values.square(), at, at, who)


def _gap_sums(builder: _Builder, rows: Rows, finite: Tensor) -> None:
    """How far apart the policies are, whatever the rules."""
    length = rows["length"].clamp(min=1)
    product = rows["log_ratio"].clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).expm1()
    lowest, highest = rows["log_ratio_min"].exp(), rows["log_ratio_max"].exp()
    builder.family("rho_token", rows["length"], rows["excess"], rows["excess_sq"], highest, lowest, finite)
    builder.per_sequence("rho_seq", product, finite, centre=1.0)
    builder.sums["log_ratio"] = rows["log_ratio"].sum()
    builder.sums["log_ratio_clamped"] = rows["log_ratio_clamped"].sum()

    train_log_ppl = -rows["train_log_prob"] / length
    log_ppl_diff = -rows["log_ratio"] / length  # rollout's mean log-prob − trainer's
    for name, values in {
        "training_log_ppl": train_log_ppl,
        "training_ppl": train_log_ppl.exp(),
        "rollout_log_ppl": train_log_ppl - log_ppl_diff,
        "rollout_ppl": (train_log_ppl - log_ppl_diff).exp(),
        "log_ppl_abs_diff": log_ppl_diff.abs(),
        "ppl_ratio": log_ppl_diff.exp(),
    }.items():
        builder.sums[name] = torch.where(finite, values, 0.0).sum()
    builder.per_sequence("log_ppl_diff", log_ppl_diff, finite)

    for name in ("q", "qq", "p", "pp", "pq"):
        builder.sums[name] = rows[name].sum()
    zeros = torch.zeros_like(rows["gap"])
    builder.family("gap", rows["length"], rows["gap"], rows["gap_sq"], rows["gap_max"], zeros, finite)


def _weight_sums(
    builder: _Builder,
    rows: Rows,
    rules: CorrectionRules,
    nonempty: Tensor,
    finite: Tensor,
    keep: Tensor,
    survives: Tensor,
) -> None:
    """Raw and logged weights, per token and per sequence, and the normaliser."""
    rule, length, num_kept = rules.weight, rows["length"], rows["num_kept"]
    mean_length = length.clamp(min=1)
    if rule.level in (None, "token"):
        raw_low, raw_high = rows["log_ratio_min"].exp(), rows["log_ratio_max"].exp()
        builder.family("raw_token", length, rows["excess"], rows["excess_sq"], raw_high, raw_low, finite)
        raw_seq = rows["excess"] / mean_length
    else:
        raw_seq = rows["raw"]
        _expand(builder, "raw_token", raw_seq, length, finite)
    builder.per_sequence("raw_seq", raw_seq, finite, centre=1.0)
    if rule.level is None:
        return

    builder.sums["ratio_high"], builder.sums["ratio_low"] = rows["ratio_high"].sum(), rows["ratio_low"].sum()
    builder.sums["seq_high"] = (finite & (raw_seq > rule.upper - 1.0)).double().sum()
    edge = 1.0 / rule.upper if rule.bound == "truncate" else rule.lower
    builder.sums["seq_low"] = (finite & (raw_seq < edge - 1.0)).double().sum()

    # What is logged: zeros included where a sequence is rejected; verl logs before rejection.
    counted = finite if rule.metrics == "verl" else keep
    if rule.level == "token":
        total = torch.where(counted, rows["weight"], -length)
        squares = torch.where(counted, rows["weight_sq"], length)
        high = torch.where(counted, rows["weight_max"], -1.0) + 1.0
        low = torch.where(counted, rows["weight_min"], -1.0) + 1.0
        builder.family("weight_token", length, total, squares, high, low, nonempty)
        builder.per_sequence("weight_seq", total / mean_length, nonempty, centre=1.0)
        norm_all, norm_kept, count_all, count_kept = rows["norm_all"], rows["norm_kept"], length, num_kept
    else:
        bounded = rows["bounded"]
        value = torch.where(counted if rule.metrics == "verl" else survives, bounded, -1.0)
        builder.per_sequence("weight_seq", value, nonempty, centre=1.0)
        kept = length if rule.metrics == "verl" else num_kept
        lost = length - kept
        low = torch.where(lost > 0, -1.0, value) + 1.0
        builder.family(
            "weight_token",
            length,
            kept * value - lost,
            kept * value.square() + lost,
            value + 1.0,
            low,
            nonempty,
        )
        norm_all = norm_kept = bounded
        count_all = count_kept = torch.ones_like(bounded)
    who, total, count = (
        (finite, norm_all, count_all) if rule.normalize_over == "all" else (survives, norm_kept, count_kept)
    )
    builder.sums["norm.n"] = torch.where(who, count, 0.0).sum()
    builder.sums["norm.s1"] = torch.where(who, total, 0.0).sum()


def _expand(builder: _Builder, name: str, values: Tensor, length: Tensor, who: Tensor) -> None:
    """A sequence's value counted once for each of its tokens."""
    at = values + 1.0
    builder.family(name, length, values * length, values.square() * length, at, at, who)


def _criterion_sums(builder: _Builder, rows: Rows, name: str, rule: RejectRule, finite: Tensor) -> None:
    """One rejection criterion: its statistic, who is out of bounds, what it masks by itself."""
    length, failed = rows["length"], rows[f"{name}_failed"]
    if rule.reduction == "none":
        high, low = rows[f"{name}_high"], rows[f"{name}_low"]
        values = (rows[f"{name}_sum"], rows[f"{name}_sum_sq"], rows[f"{name}_max"], rows[f"{name}_min"])
        builder.family(name, length, *values, finite)
        held, held_sq = rows[f"{name}_held"], rows[f"{name}_held_sq"]
        masked = high + low if rule.scope == "token" else failed * length
    else:
        value = rows[f"{name}_value"]
        upper = math.inf if rule.upper is None else rule.upper
        lower = -math.inf if rule.lower is None else rule.lower
        high, low = (value > upper).double(), (value < lower).double()
        builder.per_sequence(name, value, finite)
        builder.sums[f"{name}.by_token"] = torch.where(finite, value * length, 0.0).sum()
        clamped = value.clamp(0.0 if rule.lower is None else lower, upper)
        held, held_sq = clamped * length, clamped.square() * length
        masked = failed * length
    for key, values_ in {
        "high": high,
        "low": low,
        "masked": masked,
        "failed": failed,
        "held": held,
        "held_sq": held_sq,
    }.items():
        builder.sums[f"{name}.{key}"] = torch.where(finite, values_, 0.0).sum()


# --- on the host ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, Σ(x − centre), Σ(x − centre)², extremes of one family of values."""

    count: float
    s1: float
    s2: float
    high: float
    low: float
    centre: float

    @property
    def mean(self) -> float:
        """Mean; 0.0 of nothing."""
        return self.centre + self.s1 / self.count if self.count else 0.0

    @property
    def mean_square(self) -> float:
        """Mean of x²."""
        if not self.count:
            return 0.0
        return (self.s2 + 2.0 * self.centre * self.s1) / self.count + self.centre**2

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self._variance()) if self.count else 0.0

    @property
    def sample_std(self) -> float:
        """Standard deviation with n − 1 (verl's choice for per-sequence figures)."""
        return math.sqrt(self._variance() * self.count / (self.count - 1)) if self.count > 1 else 0.0

    def _variance(self) -> float:
        return max(self.s2 / self.count - (self.s1 / self.count) ** 2, 0.0)

    @property
    def ess(self) -> float:
        """Effective sample size (Σw)² / (n Σw²) ∈ (0, 1]; 0.0 when every weight is zero.

        Source: Kish 1965; Owen, "Monte Carlo theory, methods and examples", section 9.3.
        """
        return self.mean**2 / self.mean_square if self.count and self.mean_square > 0 else 0.0

    @property
    def max(self) -> float:
        """Largest value; 0.0 of nothing."""
        return self.high if self.count else 0.0

    @property
    def min(self) -> float:
        """Smallest value; 0.0 of nothing."""
        return self.low if self.count else 0.0


@dataclass(frozen=True, slots=True)
class HostTally:
    """A tally as plain numbers: of one mini-batch, or of several merged."""

    sums: dict[str, float]
    maxima: dict[str, float]

    def __add__(self, other: HostTally) -> HostTally:
        """The tally of both mini-batches together."""
        return HostTally(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: max(value, other.maxima[name]) for name, value in self.maxima.items()},
        )

    def batch_norm_factor(self, rules: CorrectionRules) -> float:
        """Mean weight of the mini-batch, by which its weights are divided (1.0: nothing to do)."""
        if rules.weight.level is None or not rules.weight.normalize:
            return 1.0
        count = self.sums["norm.n"]
        mean = 1.0 + self.sums["norm.s1"] / count if count else 1.0
        return mean if mean > 1e-8 else 1.0

    def normalized(self, factor: float) -> HostTally:
        """The applied weights' sums after dividing every weight of this mini-batch by `factor`."""
        if factor == 1.0:
            return self
        sums, maxima = dict(self.sums), dict(self.maxima)
        for name in ("weight_token", "weight_seq"):
            n, s1, s2 = (sums[f"{name}.{part}"] for part in ("n", "s1", "s2"))
            sums[f"{name}.s1"] = (s1 + n * (1.0 - factor)) / factor
            sums[f"{name}.s2"] = (s2 + 2.0 * (1.0 - factor) * s1 + n * (1.0 - factor) ** 2) / factor**2
            for part in ("max", "min"):
                maxima[f"{name}.{part}"] /= factor
        return HostTally(sums, maxima)

    def moments(self, name: str, centre: float = 0.0) -> Moments:
        """The family `name`."""
        count, s1, s2 = (self.sums[f"{name}.{part}"] for part in ("n", "s1", "s2"))
        return Moments(count, s1, s2, self.maxima[f"{name}.max"], -self.maxima[f"{name}.min"], centre)

    def per(self, name: str, count: str) -> float:
        """A sum divided by a count; 0.0 of nothing."""
        return self.sums[name] / self.sums[count] if self.sums[count] else 0.0


def correction_metrics(tally: HostTally, rules: CorrectionRules) -> dict[str, float]:
    """Every `rollout_corr/*` and `training/rollout_*` metric; definitions in `rlctl.metric_names`."""
    found = _gap_metrics(tally) | _rejection_metrics(tally, rules)
    found |= _family_metrics(tally, rules, "raw", "rollout_is_raw_")
    if rules.weight.level is not None:
        verl = rules.weight.metrics == "verl"
        found |= (_verl_weight_metrics if verl else _applied_metrics)(tally, rules)
        unit = "finite_tokens" if rules.weight.level == "token" else "finite_sequences"
        found["rollout_is_ratio_fraction_high"] = tally.per("ratio_high", unit)
        found["rollout_is_ratio_fraction_low"] = tally.per("ratio_low", unit)
        found["rollout_is_seq_fraction_high"] = tally.per("seq_high", "finite_sequences")
        found["rollout_is_seq_fraction_low"] = tally.per("seq_low", "finite_sequences")
    metrics = {f"rollout_corr/{name}": value for name, value in found.items()}
    return metrics | _probability_metrics(tally)


def _gap_metrics(tally: HostTally) -> dict[str, float]:
    rho, product = tally.moments("rho_token", 1.0), tally.moments("rho_seq", 1.0)
    diff = tally.moments("log_ppl_diff")
    found = {
        name: tally.per(name, "finite_sequences")
        for name in (
            "training_ppl",
            "training_log_ppl",
            "rollout_ppl",
            "rollout_log_ppl",
            "log_ppl_abs_diff",
            "ppl_ratio",
        )
    }
    tokens = tally.sums["finite_tokens"] or 1.0
    return found | {
        "log_ppl_diff": diff.mean,
        "log_ppl_diff_max": diff.max,
        "log_ppl_diff_min": diff.min,
        "kl": -tally.sums["log_ratio"] / tokens,
        "k3_kl": (rho.s1 - tally.sums["log_ratio_clamped"]) / tokens,
        "chi2_token": (rho.s2 + 2.0 * rho.s1) / rho.count if rho.count else 0.0,
        "chi2_seq": (product.s2 + 2.0 * product.s1) / product.count if product.count else 0.0,
        "nonfinite_sequences": tally.sums["sequences"] - tally.sums["finite_sequences"],
        "saturated_sequences": tally.sums["saturated"],
    }


def _probability_metrics(tally: HostTally) -> dict[str, float]:
    gap, n = tally.moments("gap"), tally.sums["finite_tokens"]
    q, p = tally.sums["q"], tally.sums["p"]
    covariance = n * tally.sums["pq"] - p * q
    spread = (n * tally.sums["qq"] - q * q) * (n * tally.sums["pp"] - p * p)
    return {
        "training/rollout_probs_diff_mean": gap.mean,
        "training/rollout_probs_diff_max": gap.max,
        "training/rollout_probs_diff_std": gap.sample_std,
        # Two constant columns have no correlation; 0.0 would look like disagreement.
        "training/rollout_actor_probs_pearson_corr": covariance / math.sqrt(spread) if spread > 0 else 1.0,
    }


def _family_metrics(tally: HostTally, rules: CorrectionRules, family: str, prefix: str) -> dict[str, float]:
    """mean … seq_max_deviation of one family; n counts tokens at token level, else sequences."""
    token, seq = tally.moments(f"{family}_token", 1.0), tally.moments(f"{family}_seq", 1.0)
    unit = token if rules.weight.level in (None, "token") else seq
    return {
        f"{prefix}mean": unit.mean,
        f"{prefix}std": unit.std,
        f"{prefix}max": unit.max,
        f"{prefix}min": unit.min,
        f"{prefix}eff_sample_size": unit.ess,
        f"{prefix}eff_sample_size_token": token.ess,
        f"{prefix}seq_mean": seq.mean,
        f"{prefix}seq_std": seq.sample_std,
        f"{prefix}seq_max": seq.max,
        f"{prefix}seq_min": seq.min,
        f"{prefix}seq_max_deviation": max(abs(seq.max - 1.0), abs(seq.min - 1.0)),
    }


def _applied_metrics(tally: HostTally, rules: CorrectionRules) -> dict[str, float]:
    return _family_metrics(tally, rules, "weight", "rollout_is_")


def _verl_weight_metrics(tally: HostTally, rules: CorrectionRules) -> dict[str, float]:
    """verl 0.9's formulas: length-weighted at every level, extremes of sequences before the bound."""
    found = _applied_metrics(tally, rules)
    token = tally.moments("weight_token", 1.0)
    found |= {"rollout_is_mean": token.mean, "rollout_is_std": token.std}
    found |= {"rollout_is_eff_sample_size": token.ess}
    if rules.weight.level != "token":
        raw = tally.moments("raw_seq", 1.0)
        found |= {"rollout_is_max": raw.max, "rollout_is_min": raw.min}
    return found


def _rejection_metrics(tally: HostTally, rules: CorrectionRules) -> dict[str, float]:
    sums = tally.sums
    found = {
        "rollout_rs_masked_fraction": 1.0 - sums["kept_tokens"] / sums["tokens"] if sums["tokens"] else 0.0,
        "rollout_rs_seq_masked_fraction": tally.per("rejected_sequences", "sequences"),
    }
    for index, rule in enumerate(rules.reject):
        name, prefix = f"rs{index}", f"rollout_rs_{rule.name}_"
        by_token = rule.reduction == "none"
        unit = "finite_tokens" if by_token else "finite_sequences"
        values = tally.moments(name, 1.0 if by_token and rule.statistic == "ratio" else 0.0)
        mean, std = values.mean, values.std
        if rules.weight.metrics == "verl":
            tokens = sums["finite_tokens"] or 1.0
            mean = values.mean if by_token else sums[f"{name}.by_token"] / tokens
            held = sums[f"{name}.held"] / tokens
            std = math.sqrt(max(sums[f"{name}.held_sq"] / tokens - held**2, 0.0))
        found |= {
            f"{prefix}mean": mean,
            f"{prefix}max": values.max,
            f"{prefix}min": values.min,
            f"{prefix}std": std,
            f"{prefix}fraction_high": tally.per(f"{name}.high", unit),
            f"{prefix}fraction_low": tally.per(f"{name}.low", unit),
            f"{prefix}masked_fraction": tally.per(f"{name}.masked", "finite_tokens"),
            f"{prefix}seq_masked_fraction": tally.per(f"{name}.failed", "finite_sequences"),
        }
    return found
