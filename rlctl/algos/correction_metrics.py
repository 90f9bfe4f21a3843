"""What correction measures: sums on the device, metrics on the host.

Weights and ratios are summed as distances from 1, so that variances near ρ = 1 survive rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlctl.algos.rules import LOG_RATIO_CLAMP, CorrectionRules, RejectRule
from rlctl.algos.tally import HostTally, Tally, TallyBuilder

#: Per-row sums, each (B,).
Rows = dict[str, Tensor]


# --- on the device --------------------------------------------------------------------------------


def policy_gap_sums(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Rows:
    """Row sums comparing the two policies' probabilities of the sampled tokens, all (B, T) in.

    Probabilities are summed as distances from 1, where those of a sharp policy lie.
    """
    train = torch.where(mask, log_probs, 0.0)
    rows: Rows = {"train_log_prob": train.sum(-1)}
    train_prob = train.exp_().sub_(1.0)
    rollout_prob = torch.where(mask, rollout_log_probs, 0.0).exp_().sub_(1.0)
    rows |= {"q": train_prob.sum(-1), "qq": row_squares(train_prob)}
    rows |= {"p": rollout_prob.sum(-1), "pp": row_squares(rollout_prob)}
    gap = train_prob.sub_(rollout_prob).abs_()
    rows |= {"gap": gap.sum(-1), "gap_sq": row_squares(gap), "gap_max": gap.amax(-1)}
    return rows


def row_squares(values: Tensor) -> Tensor:
    """Row-wise Σ x² without a temporary of its size."""
    norm: Tensor = torch.linalg.vector_norm(values, dim=-1)
    return norm.square()


def build_tally(
    rows: Rows, rules: CorrectionRules, *, nonempty: Tensor, finite: Tensor, keep: Tensor
) -> Tally:
    """Add the rows up.

    Args:
        rows: row sums in float64, zero for sequences with non-finite log-probs.
        nonempty, finite, keep: (B,) bool: has response tokens; and finite log-probs; and survives
            sequence-scoped rejection.
    """
    builder = TallyBuilder()
    length, num_kept = rows["length"], rows["num_kept"]
    survives = keep & (num_kept > 0)
    builder.sums |= {
        "tokens": length.sum(),
        "sequences": nonempty.double().sum(),
        "finite_tokens": torch.where(finite, length, 0.0).sum(),  # selecting rows would wait for a GPU
        "finite_sequences": finite.double().sum(),
        "kept_tokens": num_kept.sum(),
        "kept_sequences": survives.double().sum(),
        "rejected_sequences": (nonempty & (num_kept < length)).double().sum(),
        "saturated": (finite & (rows["log_ratio"].abs() >= LOG_RATIO_CLAMP)).double().sum(),
    }
    _gap_sums(builder, rows, finite)
    _weight_sums(builder, rows, rules, nonempty, finite, keep, survives)
    for index, rule in enumerate(rules.reject):
        _criterion_sums(builder, rows, f"rs{index}", rule, finite, verl=rules.weight.metrics == "verl")
    return Tally(builder.sums, builder.maxima)


def _gap_sums(builder: TallyBuilder, rows: Rows, finite: Tensor) -> None:
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

    for name in ("q", "qq", "p", "pp"):
        builder.sums[name] = rows[name].sum()
    zeros = torch.zeros_like(rows["gap"])
    builder.family("gap", rows["length"], rows["gap"], rows["gap_sq"], rows["gap_max"], zeros, finite)


def _weight_sums(
    builder: TallyBuilder,
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
        builder.powers("raw_token", rows["ratio"], rows["ratio_sq"], finite)
        raw_seq, raw_at = rows["excess"] / mean_length, rows["ratio"] / mean_length
    else:
        raw_seq, raw_at = rows["raw"], rows["raw"] + 1.0
        _expand(builder, "raw_token", raw_seq, length, finite)
    builder.per_sequence("raw_seq", raw_seq, finite, centre=1.0, at=raw_at)
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
        high = torch.where(counted, rows["weight_max"], 0.0)
        low = torch.where(counted, rows["weight_min"], 0.0)
        builder.family("weight_token", length, total, squares, high, low, nonempty)
        first, second = (torch.where(counted, rows[f"weight_total{power}"], 0.0) for power in ("", "_sq"))
        builder.powers("weight_token", first, second, nonempty)
        builder.per_sequence("weight_seq", total / mean_length, nonempty, 1.0, first / mean_length)
        norm = rows["norm"] if rule.normalize else length
        count = length if rule.normalize_over == "all" else num_kept
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
        builder.powers("weight_token", kept * (value + 1.0), kept * (value + 1.0).square(), nonempty)
        norm, count = bounded + 1.0, torch.ones_like(bounded)
    who = finite if rule.normalize_over == "all" else survives
    builder.sums["norm.n"] = torch.where(who, count, 0.0).sum()
    builder.sums["norm"] = torch.where(who, norm, 0.0).sum()


def _expand(builder: TallyBuilder, name: str, values: Tensor, length: Tensor, who: Tensor) -> None:
    """A sequence's value counted once for each of its tokens."""
    at = values + 1.0
    builder.family(name, length, values * length, values.square() * length, at, at, who)
    builder.powers(name, at * length, at.square() * length, who)


def _criterion_sums(
    builder: TallyBuilder, rows: Rows, name: str, rule: RejectRule, finite: Tensor, *, verl: bool
) -> None:
    """One rejection criterion: its statistic, who is out of bounds, what it masks by itself."""
    length, failed = rows["length"], rows[f"{name}_failed"]
    if rule.reduction == "none":
        high, low = rows[f"{name}_high"], rows[f"{name}_low"]
        values = (rows[f"{name}_sum"], rows[f"{name}_sum_sq"], rows[f"{name}_max"], rows[f"{name}_min"])
        builder.family(name, length, *values, finite)
        masked = high + low if rule.scope == "token" else failed * length
    else:
        value = rows[f"{name}_value"]
        upper = math.inf if rule.upper is None else rule.upper
        lower = -math.inf if rule.lower is None else rule.lower
        high, low = (value > upper).double(), (value < lower).double()
        builder.per_sequence(name, value, finite)
        builder.sums[f"{name}.by_token"] = torch.where(finite, value * length, 0.0).sum()
        clamped = value.clamp(0.0 if rule.lower is None else lower, upper)
        rows |= {f"{name}_held": clamped * length, f"{name}_held_sq": clamped.square() * length}
        masked = failed * length
    sums = {"high": high, "low": low, "masked": masked, "failed": failed}
    if verl:
        sums |= {"held": rows[f"{name}_held"], "held_sq": rows[f"{name}_held_sq"]}
    for key, summands in sums.items():
        builder.sums[f"{name}.{key}"] = torch.where(finite, summands, 0.0).sum()


# --- on the host ----------------------------------------------------------------------------------


def batch_norm_factor(tally: HostTally, rules: CorrectionRules) -> float:
    """Mean weight of the mini-batch, by which its weights are divided (1.0: nothing to do)."""
    if rules.weight.level is None or not rules.weight.normalize:
        return 1.0
    mean = tally.per("norm", "norm.n")
    return mean if mean > 0.0 else 1.0


def normalized(tally: HostTally, rules: CorrectionRules) -> HostTally:
    """The applied weights' sums after dividing every weight of this mini-batch by its factor.

    verl 0.9 logs its weights before that division: under its convention nothing changes.
    """
    factor = batch_norm_factor(tally, rules)
    if factor == 1.0 or rules.weight.metrics == "verl":
        return tally
    sums, maxima = dict(tally.sums), dict(tally.maxima)
    for name in ("weight_token", "weight_seq"):
        n, s1, s2, p1, p2 = (sums[f"{name}.{part}"] for part in ("n", "s1", "s2", "p1", "p2"))
        first = s1 + n * (1.0 - factor)  # Σ(w − factor)
        second = s2 + 2.0 * (1.0 - factor) * s1 + n * (1.0 - factor) ** 2
        if factor < 0.5:  # sums of distances from 1 would cancel
            first, second = p1 - n * factor, p2 - 2.0 * factor * p1 + n * factor**2
        sums[f"{name}.s1"], sums[f"{name}.s2"] = first / factor, second / factor**2
        sums[f"{name}.p1"] /= factor
        sums[f"{name}.p2"] /= factor**2
        for part in ("max", "min"):
            maxima[f"{name}.{part}"] /= factor
    return HostTally(sums, maxima)


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
    pq = 0.5 * (tally.sums["pp"] + tally.sums["qq"] - gap.s2)  # from (p − q)²
    covariance = n * pq - p * q
    spreads = [n * tally.sums["qq"] - q * q, n * tally.sums["pp"] - p * p]
    # The squares were summed in float32: a smaller spread than this is their rounding. A constant
    # column has no correlation, and 0.0 would look like disagreement.
    constant = any(
        spread <= 1e-6 * n * tally.sums[key] for spread, key in zip(spreads, ("qq", "pp"), strict=True)
    )
    pearson = 1.0 if constant else covariance / math.sqrt(spreads[0] * spreads[1])
    return {
        "training/rollout_probs_diff_mean": gap.mean,
        "training/rollout_probs_diff_max": gap.max,
        "training/rollout_probs_diff_std": gap.sample_std,
        "training/rollout_actor_probs_pearson_corr": min(max(pearson, -1.0), 1.0),
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
        f"{prefix}seq_max_deviation": max(abs(seq.max - 1.0), abs(seq.min - 1.0)) if seq.count else 0.0,
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
