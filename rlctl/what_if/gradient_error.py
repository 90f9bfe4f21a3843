"""Estimates the error of a setting's gradient from sums over its weights.

The target is g = E_train[A·∇log π]. The exact weight of an episode, W = Π ρ, estimates it without bias. A
setting with applied weights w estimates it from a mini-batch of G prompt groups as ĝ, with expectation
m = E_rollout[w·A·∇log π] and noise V per group. A constant factor on a gradient acts like another learning
rate, so the error of a setting is the minimum over c of

    E|c·ĝ − g|² / |g|² = 1 − (m·g)² / (|g|² (|m|² + V/G)) = (bias² + variance) / (1 + bias² + variance),

with bias² = |m|²|g|²/(m·g)² − 1, the squared tangent of the angle between m and g, and
variance = V|g|²/(G (m·g)²), noise over useful signal. The error is 0 for the true gradient and 1 for an
unrelated gradient. Scaling all weights does not change it. The mean-squared error with c = 1, in contrast,
would prefer rejecting everything if V/G exceeds |g|².

A dump contains no gradients: m, g and V are estimated from the weights, see `errors`.
`docs/how-to/what-if.md` describes how accurate the estimates are.
"""

from __future__ import annotations

import numpy as np

from rlctl.what_if.setting_sums import Floats, SettingSums

#: Noise of one group without weights, divided by the squared signal |g|².
NOISE = 10.0
#: Share of the unevenness of the weights that becomes bias, times the response length. A token's score
#: is correlated only with the part of the unevenness that depends on this token.
ALIGNED = 2.0
#: Upper bound of bias² + variance, which would be infinite for a setting that keeps nothing.
FAR = 1e6
RESAMPLES = 400
#: Share of the resamples that an interval contains (the central ones).
LEVEL = 0.9


def interval(values: Floats) -> tuple[Floats, Floats]:
    """Bounds of the central LEVEL of the resamples (rows 1 …) of (R, …) values."""
    tail = (1.0 - LEVEL) / 2.0
    low, high = np.quantile(values[1:], [tail, 1.0 - tail], axis=0)
    return low, high


def errors(sums: SettingSums, groups_per_batch: float) -> Floats | None:
    """(R, S): the error of every setting, row 0 from the sample, the others from its resamples; near 1 if a
    setting keeps nothing. None if there is only one block or no advantage differs from zero.

    With means weighted by e, a setting keeps the share F = mean of w / mean of W of the gradient. The
    unevenness of its weights is the mean square of (w − F·W)/((1 + W)/2) under ½ π_train + ½ π_rollout, where
    it is bounded though one policy has almost no mass. Then bias² = `ALIGNED` / length · unevenness / F², and
    variance = `NOISE` / G · mean of w² / F². `groups_per_batch` is G.
    """
    used = sums.counts[0] > 0  # blocks that have groups
    num_blocks = int(used.sum())
    if num_blocks < 2 or sums.exact[0].sum() <= 0.0:
        return None
    resamples = np.random.default_rng(0).multinomial(
        num_blocks, np.full(num_blocks, 1.0 / num_blocks), size=RESAMPLES
    )
    drawn = np.concatenate([np.ones((1, num_blocks)), resamples])  # how often each block counts
    mean = (drawn @ sums.product[used]) / (drawn @ sums.counts[1][used])  # of W over episodes, nearly 1
    energy = np.einsum("sik,rk->irs", sums.weighted[:, :, used], drawn)
    exact, exact_halfway = sums.exact[:, used] @ drawn.T
    exact = (np.maximum(exact, 1e-300) / mean)[:, None]
    kept, squares, halfway, mixed = energy / exact
    raw = kept / mean[:, None]  # relative to the unnormalised W, whose sample mean is not 1
    uneven = np.maximum(halfway - 2.0 * raw * mixed + raw**2 * exact_halfway[:, None] / exact, 0.0)
    length = sums.counts[2].sum() / sums.counts[1].sum()
    useful = kept > 1e-12
    total = min(1.0, ALIGNED / length) * uneven + NOISE / groups_per_batch * squares
    total = np.where(useful, np.minimum(total / np.square(np.where(useful, kept, 1.0)), FAR), FAR)
    error: Floats = total / (1.0 + total)
    return error
