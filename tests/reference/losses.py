"""Losses and their aggregation the slow way: one sequence at a time, plain Python, float64.

A policy loss takes the lists of one sequence: log π_θ; the same again as the stopped gradients see it
(`held`, which finite differences leave alone); log π_old; advantages; weights; and whether each token
counts. It gives (loss, clipped, clipped_lower) per token.
"""

from __future__ import annotations

import math
from statistics import fmean

NOTHING = (0.0, False, False)


def policy_loss(rule, log_probs, held, old, advantages, weights, counts) -> list[tuple[float, bool, bool]]:
    places = [t for t, yes in enumerate(counts) if yes]
    found = [NOTHING] * len(counts)
    mean_gap = fmean(held[t] - old[t] for t in places) if places else 0.0
    for t in places:
        if rule.name == "gspo":
            ratio = stopped_ratio = bounded_exp(mean_gap) * math.exp(log_probs[t] - held[t])
        else:
            ratio, stopped_ratio = bounded_exp(log_probs[t] - old[t]), bounded_exp(held[t] - old[t])
        token = _Token(rule, log_probs[t], held[t], old[t], advantages[t], ratio, stopped_ratio)
        objective, clipped, lower = _OBJECTIVES[rule.name](token)
        found[t] = (-weights[t] * objective, clipped, lower)
    return found


class _Token:
    """What the objective of one token reads; `stopped` is its ratio as a constant."""

    def __init__(self, rule, log_prob, held, old, advantage, ratio, stopped):
        self.rule, self.log_prob, self.held, self.old = rule, log_prob, held, old
        self.advantage, self.ratio, self.stopped = advantage, ratio, stopped


def _reinforce(x: _Token):
    return x.advantage * x.log_prob, False, False


def _clip(x: _Token):
    """The smaller of the two surrogates: a gain is cut off, a loss never is."""
    inside = clip(x.ratio, 1.0 - x.rule.clip_low, 1.0 + x.rule.clip_high)
    objective = min(x.ratio * x.advantage, inside * x.advantage)
    return objective, objective < x.ratio * x.advantage, False


def _dual_clip(x: _Token):
    objective, clipped, _ = _clip(x)
    if x.rule.clip_c is None or x.advantage >= 0 or objective >= x.rule.clip_c * x.advantage:
        return objective, clipped, False
    return x.rule.clip_c * x.advantage, clipped, True


def _cispo(x: _Token):
    weight = clip(x.stopped, 1.0 - x.rule.clip_low, 1.0 + x.rule.clip_high)
    return weight * x.advantage * x.log_prob, weight != x.stopped, False


def _sapo(x: _Token):
    tau = x.rule.tau_pos if x.advantage > 0 else x.rule.tau_neg
    return 4.0 / tau / (1.0 + math.exp(-tau * (x.ratio - 1.0))) * x.advantage, False, False


def _dppo(x: _Token):
    new, old = math.exp(x.held), math.exp(x.old)
    if x.rule.divergence == "tv":
        distance = abs(new - old)
    else:
        distance = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
    limit = x.rule.clip_high if x.advantage > 0 else x.rule.clip_low
    outwards = (new - old) * x.advantage > 0
    if outwards and distance > limit:
        return 0.0, True, False
    cap = math.inf if x.rule.clip_c is None else x.rule.clip_c
    return min(x.stopped, cap) * x.advantage * x.log_prob, False, x.stopped > cap


_OBJECTIVES = {
    "reinforce": _reinforce,
    "ppo_clip": _dual_clip,
    "gspo": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo": _dppo,
}


def value_loss(value, old_value, target, *, clip_range: float) -> tuple[float, bool]:
    """The loss of one token, and whether its clip was in force."""
    near = clip(value, old_value - clip_range, old_value + clip_range)
    free, held = (value - target) ** 2 / 2, (near - target) ** 2 / 2
    return max(free, held), held > free


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def bounded_exp(x: float) -> float:
    return math.exp(clip(x, -20.0, 20.0))


def aggregate(values, counted, mode: str, horizon: int) -> float:
    """One number from (B, T) lists; `counted` marks the tokens of the denominators."""
    rows = [
        [v for v, yes in zip(row, marks, strict=True) if yes]
        for row, marks in zip(values, counted, strict=True)
    ]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    per_sequence = {
        "seq-mean-token-sum": [sum(row) for row in rows],
        "seq-mean-token-mean": [sum(row) / len(row) for row in rows],
        "seq-mean-token-sum-norm": [sum(row) / horizon for row in rows],
    }[mode]
    return sum(per_sequence) / len(per_sequence)
