"""Losses and their aggregation the slow way: one token at a time, plain Python, float64."""

from __future__ import annotations

import math


def reinforce(log_prob: float, advantage: float, weight: float) -> float:
    return -weight * advantage * log_prob


def ppo_clip(log_prob, old_log_prob, advantage, weight, *, clip_low, clip_high) -> tuple[float, bool]:
    """The loss of one token, and whether the clip cut its gradient."""
    ratio = math.exp(min(max(log_prob - old_log_prob, -20.0), 20.0))
    held = min(max(ratio, 1.0 - clip_low), 1.0 + clip_high)
    clipped = held * advantage < ratio * advantage
    return -weight * min(ratio * advantage, held * advantage), clipped


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
