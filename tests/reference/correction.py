"""Rollout correction the slow way: one sequence at a time, plain Python, float64.

Written from the definitions (docs/explanation/rollout-correction.md), not from `rlctl.algos`, and shares no
arithmetic with it. Only the log-ratio itself is rounded to float32, because the definition forms it
there. Numbers go in as lists, numbers come out.
"""

from __future__ import annotations

import math
import statistics
import struct
from dataclasses import dataclass, field

CLAMP = 20.0


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def clamp(value: float, low: float = -CLAMP, high: float = CLAMP) -> float:
    return min(max(value, low), high)


@dataclass
class Sequence:
    """One response: its tokens' log-probs, and everything derived from them."""

    train: list[float]
    rollout: list[float]
    advantage: float = 0.0
    finite: bool = True
    log_ratio: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)  # one weight per token, before the bound
    bounded: list[float] = field(default_factory=list)
    keep: list[bool] = field(default_factory=list)
    applied: list[float] = field(default_factory=list)  # bounded, 0 where rejected, normalised
    judged: list[tuple[list[float], list[bool]]] = field(default_factory=list)  # per rule: values, rejects

    def __post_init__(self) -> None:
        self.finite = all(math.isfinite(v) for v in self.train + self.rollout)
        if self.finite:
            self.log_ratio = [float32(a - b) for a, b in zip(self.train, self.rollout, strict=True)]

    def __len__(self) -> int:
        return len(self.train)

    @property
    def survives(self) -> bool:
        return any(self.keep)


@dataclass
class Reference:
    """`weights` are not yet normalised; cells outside the response mask hold 0.0 and False."""

    weights: list[list[float]] | None
    keep: list[list[bool]]
    nonfinite: list[bool]
    factor: float
    metrics: dict[str, float]


def reference(train, rollout, mask, rules, advantages=None) -> Reference:
    """All of rollout correction for (B, T) nested lists."""
    batch, cells = [], []
    for row, responded in enumerate(mask):
        columns = [t for t, yes in enumerate(responded) if yes]
        cells.append(columns)
        advantage = sum(advantages[row][t] for t in columns) if advantages is not None else 0.0
        batch.append(
            Sequence([train[row][t] for t in columns], [rollout[row][t] for t in columns], advantage)
        )
    for sequence in batch:
        weigh(sequence, rules.weight)
        reject(sequence, rules.reject)
    factor = batch_mean(batch, rules.weight)
    for sequence in batch:
        kept = zip(sequence.bounded, sequence.keep, strict=True)
        sequence.applied = [w / factor if k else 0.0 for w, k in kept]

    metrics = all_metrics([s for s in batch if len(s)], rules)
    weights = [[0.0] * len(row) for row in mask]
    keep = [[False] * len(row) for row in mask]
    for row, (columns, sequence) in enumerate(zip(cells, batch, strict=True)):
        for t, w, k in zip(columns, sequence.bounded, sequence.keep, strict=True):
            weights[row][t], keep[row][t] = (w if k else 0.0), k
    nonfinite = [not sequence.finite for sequence in batch]
    return Reference(None if rules.weight.level is None else weights, keep, nonfinite, factor, metrics)


# --- weights: level → bound → normalise -----------------------------------------------------------


def weigh(sequence: Sequence, rule) -> None:
    r = sequence.log_ratio
    if not sequence.finite:
        sequence.raw = sequence.bounded = [0.0] * len(sequence)
        return
    if rule.level == "sequence":
        sequence.raw = [math.exp(clamp(sum(r)))] * len(r)
    elif rule.level == "geometric":
        sequence.raw = [math.exp(clamp(sum(r) / max(len(r), 1)))] * len(r)
    else:
        sequence.raw = [math.exp(clamp(x)) for x in r]
    sequence.bounded = [bounded(w, rule) for w in sequence.raw]


def bounded(weight: float, rule) -> float:
    if rule.bound == "truncate":
        return min(weight, rule.upper)
    if rule.bound == "clip":
        return clamp(weight, rule.lower, rule.upper)
    return weight if rule.lower <= weight <= rule.upper else 0.0


def batch_mean(batch: list[Sequence], rule) -> float:
    """The factor: mean over tokens at token level, else over sequences, each counted once."""
    if rule.level is None or not rule.normalize:
        return 1.0
    chosen = []
    for sequence in batch:
        if not sequence.finite:
            continue
        everything = rule.normalize_over == "all"
        tokens = [w for w, k in zip(sequence.bounded, sequence.keep, strict=True) if k or everything]
        chosen += tokens if rule.level == "token" else tokens[:1]
    average = statistics.fmean(chosen) if chosen else 0.0
    return average if average > 0.0 else 1.0


# --- rejection: statistic → reduction → bounds → scope --------------------------------------------


def reject(sequence: Sequence, rules) -> None:
    sequence.keep = [sequence.finite] * len(sequence)
    for rule in rules:
        if not sequence.finite or not len(sequence):
            sequence.judged.append(([], []))
            continue
        values = judged_values(sequence.log_ratio, rule)
        bad = [not inside(value, rule) for value in values]
        if rule.negative_advantage_only and sequence.advantage >= 0:
            bad = [False] * len(bad)
        if rule.scope == "sequence" or rule.reduction != "none":
            bad = [any(bad)] * len(sequence)
        sequence.judged.append((values, bad))
        sequence.keep = [k and not b for k, b in zip(sequence.keep, bad, strict=True)]


def inside(value: float, rule) -> bool:
    return (rule.lower is None or value >= rule.lower) and (rule.upper is None or value <= rule.upper)


def judged_values(log_ratio: list[float], rule) -> list[float]:
    """What the criterion compares with its bounds: one value per token, or one for the sequence."""
    if rule.statistic == "ratio" and rule.reduction in ("sum", "mean"):
        total = sum(log_ratio)
        return [math.exp(clamp(total if rule.reduction == "sum" else total / len(log_ratio)))]
    values = [token_statistic(clamp(r), rule.statistic) for r in log_ratio]
    if rule.reduction == "sum":
        return [sum(values)]
    if rule.reduction == "mean":
        return [sum(values) / len(values)]
    return [max(values)] if rule.reduction == "max" else values


def token_statistic(r: float, statistic: str) -> float:
    return {"ratio": math.exp(r), "k1": -r, "k2": 0.5 * r * r, "k3": math.expm1(r) - r}[statistic]


# --- metrics --------------------------------------------------------------------------------------


def mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def std(values: list[float]) -> float:
    return statistics.pstdev(values) if values else 0.0


def sample_std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def ess(values: list[float]) -> float:
    squares = math.fsum(v * v for v in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares > 0 else 0.0


def all_metrics(nonempty: list[Sequence], rules) -> dict[str, float]:
    """`nonempty`: sequences with response tokens.

    Those with bad numbers are rejected, so they have an applied weight, 0; they have no other figure.
    """
    finite = [s for s in nonempty if s.finite]
    found = {
        "nonfinite_sequences": float(len(nonempty) - len(finite)),
        "saturated_sequences": float(sum(abs(sum(s.log_ratio)) >= CLAMP for s in finite)),
        "rollout_rs_masked_fraction": mean([float(not k) for s in nonempty for k in s.keep]),
        "rollout_rs_seq_masked_fraction": mean([float(not all(s.keep)) for s in nonempty]),
    }
    if finite:  # without, nothing else can be averaged
        found |= policy_gap(finite) | weight_metrics(nonempty, rules.weight)
        found |= criterion_metrics(finite, rules)
    metrics = {f"rollout_corr/{name}": value for name, value in found.items()}
    return metrics | (probability_metrics(finite) if finite else {})


def policy_gap(finite: list[Sequence]) -> dict[str, float]:
    train = [mean(s.train) for s in finite]
    rollout = [mean(s.rollout) for s in finite]
    diff = [-mean(s.log_ratio) for s in finite]
    tokens = [r for s in finite for r in s.log_ratio]
    return {
        "training_ppl": mean([math.exp(-v) for v in train]),
        "rollout_ppl": mean([math.exp(-v) for v in rollout]),
        "training_log_ppl": -mean(train),
        "rollout_log_ppl": -mean(rollout),
        "log_ppl_diff": mean(diff),
        "log_ppl_abs_diff": mean([abs(d) for d in diff]),
        "log_ppl_diff_max": max(diff, default=0.0),
        "log_ppl_diff_min": min(diff, default=0.0),
        "ppl_ratio": mean([math.exp(d) for d in diff]),
        "kl": -mean(tokens),
        "k3_kl": mean([math.expm1(clamp(r)) - clamp(r) for r in tokens]),
        "chi2_token": mean([math.expm1(2 * clamp(r)) for r in tokens]),
        "chi2_seq": mean([math.expm1(2 * clamp(sum(s.log_ratio))) for s in finite]),
    }


def probability_metrics(finite: list[Sequence]) -> dict[str, float]:
    train = [math.exp(v) for s in finite for v in s.train]
    rollout = [math.exp(v) for s in finite for v in s.rollout]
    gap = [abs(a - b) for a, b in zip(train, rollout, strict=True)]
    constant = len(train) < 2 or is_constant(train) or is_constant(rollout)
    return {
        "training/rollout_probs_diff_mean": mean(gap),
        "training/rollout_probs_diff_max": max(gap, default=0.0),
        "training/rollout_probs_diff_std": sample_std(gap),
        "training/rollout_actor_probs_pearson_corr": (
            1.0 if constant else statistics.correlation(train, rollout)
        ),
    }


def is_constant(probabilities: list[float]) -> bool:
    """All equal, up to what float32 resolves: a correlation means nothing."""
    return statistics.pvariance(probabilities) <= 1e-13 * mean([p * p for p in probabilities])


def weight_family(prefix: str, weights: list[list[float]], level: str | None) -> dict[str, float]:
    """Statistics of one set of weights, each sequence given as the weights of its tokens.

    At sequence levels a sequence has one weight, the one of its surviving tokens.
    """
    tokens = [w for sequence in weights for w in sequence]
    by_sequence = level in ("sequence", "geometric")
    sequences = [max(sequence) if by_sequence else mean(sequence) for sequence in weights]
    units = sequences if by_sequence else tokens
    return {
        f"{prefix}mean": mean(units),
        f"{prefix}std": std(units),
        f"{prefix}max": max(units, default=0.0),
        f"{prefix}min": min(units, default=0.0),
        f"{prefix}eff_sample_size": ess(units),
        f"{prefix}eff_sample_size_token": ess(tokens),
        f"{prefix}seq_mean": mean(sequences),
        f"{prefix}seq_std": sample_std(sequences),
        f"{prefix}seq_max": max(sequences, default=0.0),
        f"{prefix}seq_min": min(sequences, default=0.0),
        f"{prefix}seq_max_deviation": max((abs(w - 1.0) for w in sequences), default=0.0),
    }


def weight_metrics(nonempty: list[Sequence], rule) -> dict[str, float]:
    raw = [s.raw for s in nonempty if s.finite]
    found = weight_family("rollout_is_raw_", raw, rule.level)
    if rule.level is None:
        return found
    if rule.metrics is not None:
        found |= verl_weight_metrics([s.bounded for s in nonempty], raw, rule)
    else:
        found |= weight_family("rollout_is_", [s.applied for s in nonempty], rule.level)
    sequences = [mean(s) for s in raw]
    units = [w for s in raw for w in s] if rule.level == "token" else sequences
    lower = 1.0 / rule.upper if rule.bound == "truncate" else rule.lower
    return found | {
        "rollout_is_ratio_fraction_high": mean([float(w > rule.upper) for w in units]),
        "rollout_is_ratio_fraction_low": mean([float(w < lower) for w in units]),
        "rollout_is_seq_fraction_high": mean([float(w > rule.upper) for w in sequences]),
        "rollout_is_seq_fraction_low": mean([float(w < lower) for w in sequences]),
    }


def verl_weight_metrics(weights: list[list[float]], raw: list[list[float]], rule) -> dict[str, float]:
    """verl 0.9: bounded weights before rejection and normalisation, averaged over tokens always."""
    found = weight_family("rollout_is_", weights, rule.level)
    tokens = [w for sequence in weights for w in sequence]
    found["rollout_is_mean"], found["rollout_is_std"] = mean(tokens), std(tokens)
    found["rollout_is_eff_sample_size"] = ess(tokens)
    if rule.level != "token":  # extremes of a sequence weight are shown before the bound
        sequences = [s[0] for s in raw]
        found["rollout_is_max"], found["rollout_is_min"] = (
            max(sequences, default=0.0),
            min(sequences, default=0.0),
        )
    return found


def criterion_metrics(finite: list[Sequence], rules) -> dict[str, float]:
    found: dict[str, float] = {}
    for index, rule in enumerate(rules.reject):
        prefix = f"rollout_rs_{rule.name}_"
        values = [v for s in finite for v in s.judged[index][0]]
        average, spread = mean(values), std(values)
        if rules.weight.metrics is not None:  # per token: each token has its sequence's value
            tokens = []
            for s in finite:
                judged = s.judged[index][0]
                tokens += judged if rule.reduction == "none" else judged * len(s)
            average, spread = mean(tokens), std([hold(v, rule) for v in tokens])
        rejected = [s.judged[index][1] for s in finite]
        found |= {
            f"{prefix}mean": average,
            f"{prefix}std": spread,
            f"{prefix}max": max(values, default=0.0),
            f"{prefix}min": min(values, default=0.0),
            f"{prefix}fraction_high": mean(
                [float(rule.upper is not None and v > rule.upper) for v in values]
            ),
            f"{prefix}fraction_low": mean([float(rule.lower is not None and v < rule.lower) for v in values]),
            f"{prefix}masked_fraction": mean([float(b) for tokens in rejected for b in tokens]),
            f"{prefix}seq_masked_fraction": mean([float(any(tokens)) for tokens in rejected]),
        }
    return found


def hold(value: float, rule) -> float:
    """verl clamps a statistic to its bounds before taking its standard deviation."""
    low = 0.0 if rule.lower is None else rule.lower
    return clamp(value, low, math.inf if rule.upper is None else rule.upper)
