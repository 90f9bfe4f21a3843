"""KL estimates of one token, plain Python; and the KL itself, of whole distributions."""

from __future__ import annotations

import math


def estimate(kind: str, log_prob: float, ref: float, old: float, before: float = 0.0) -> float:
    """`before`: sum of log π_θ − log π_rollout over the tokens before this one, for `sequence`."""
    ratio_to_ref = math.exp(min(max(ref - log_prob, -20.0), 20.0))
    if kind == "k1":
        return log_prob - ref
    if kind == "k2":
        return (log_prob - ref) ** 2 / 2
    k3 = ratio_to_ref - 1.0 - math.log(ratio_to_ref)
    if kind == "k3":
        return k3
    gap = log_prob - old + (before if kind == "sequence" else 0.0)
    return k3 * math.exp(min(max(gap, -20.0), 20.0))


def divergence(p: list[float], q: list[float]) -> float:
    """KL(p ‖ q)."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
