"""KL estimates of one token, plain Python; and the KL itself, of whole distributions."""

from __future__ import annotations

import math


def estimate(kind: str, log_prob: float, ref: float, old: float) -> float:
    ratio_to_ref = math.exp(min(max(ref - log_prob, -20.0), 20.0))
    if kind == "k1":
        return log_prob - ref
    if kind == "k2":
        return (log_prob - ref) ** 2 / 2
    k3 = ratio_to_ref - 1.0 - math.log(ratio_to_ref)
    return k3 if kind == "k3" else k3 * math.exp(min(max(log_prob - old, -20.0), 20.0))


def divergence(p: list[float], q: list[float]) -> float:
    """KL(p ‖ q)."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
