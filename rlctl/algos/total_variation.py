"""Bounds of the total variation of two next-token distributions, of which the most likely tokens are listed.

Let q be the sampler's distribution, S its K most likely tokens, and p the trainer's. Outside S only the two
masses are known, so that |p − q| adds up to at least their difference there, and at most their sum:

    ½ (Σ_S |p − q| + |p(Sᶜ) − q(Sᶜ)|) ≤ TV(p, q) ≤ ½ (Σ_S |p − q| + p(Sᶜ) + q(Sᶜ))

by the triangle inequality, for TV = ½ Σ |p − q|. Both bounds are the total variation itself where S is the
whole vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def total_variation_bounds(trained: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper bound (m,) float64 of the total variation at each place, in [0, 1].

    Args:
        trained: (m, K) log p of the listed tokens, nats.
        sampled: (m, K) log q of the same tokens; −∞: not listed.
    """
    is_listed = sampled > -float("inf")
    p, q = (x.double().exp().masked_fill(~is_listed, 0.0) for x in (trained, sampled))
    inside = (p - q).abs().sum(-1)
    p_outside, q_outside = ((1.0 - x.sum(-1)).clamp(min=0.0) for x in (p, q))  # < 0 by rounding
    lower = 0.5 * (inside + (p_outside - q_outside).abs())
    upper = 0.5 * (inside + p_outside + q_outside)
    return lower, upper.clamp(max=1.0)
