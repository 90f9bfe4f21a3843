"""Estimates bias, variance and error of a setting's gradient from a replay's sums.

The target is g = E_train[A·∇log π]. The exact sequence weight W = Π ρ estimates it without bias. A setting
with applied weights w estimates it from a mini-batch of G prompt groups as ĝ, with expectation
m = E_rollout[w·A·∇log π] and noise V per group. A constant factor on a gradient acts like another learning
rate, so the error of a setting is the minimum over c of

    E|c·ĝ − g|² / |g|² = 1 − (m·g)² / (|g|² (|m|² + V/G)) = (bias² + variance) / (1 + bias² + variance),

with bias² = |m|²|g|²/(m·g)² − 1, the squared tangent of the angle between m and g, and
variance = V|g|²/(G (m·g)²), noise over useful signal. The error is 0 for the true gradient and 1 for an
unrelated gradient. Scaling all weights does not change it. The mean-squared error with c = 1, in contrast,
would prefer rejecting everything if V/G exceeds |g|².

`docs/how-to/what-if.md` describes how m, g and V are estimated and how accurate the estimates are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlctl.what_if.moments import Floats, ScoreMoments

#: Prior: noise of one group divided by the squared signal. Used where the replay has too little data.
PRIOR_NOISE = 10.0
#: Prior: share of the unevenness of the weights that becomes bias, times the response length. A token's score
#: is correlated only with the part of the unevenness that depends on this token.
PRIOR_ALIGNED = 2.0
#: Upper bound of bias² + variance, which would be infinite for a setting that keeps nothing.
FAR = 1e6
RESAMPLES = 400
#: Share of the resamples that an interval contains (the central ones).
LEVEL = 0.9


@dataclass(frozen=True, slots=True)
class Proxies:
    """Estimates for S settings: row 0 from the sample, the other rows from its resamples."""

    error: Floats  # (R, S), see the module docstring
    trust: float  # weight of the surrogate's gradients, in [0, 1]; the prior has the remaining weight


def draws(num_blocks: int) -> Floats:
    """(1 + RESAMPLES, K) counts per block: first every block once, then bootstrap draws of K blocks."""
    drawn = np.random.default_rng(0).multinomial(
        num_blocks, np.full(num_blocks, 1.0 / num_blocks), size=RESAMPLES
    )
    return np.concatenate([np.ones((1, num_blocks)), drawn.astype(np.float64)])


def interval(values: Floats) -> tuple[Floats, Floats]:
    """Bounds of the central LEVEL of the resamples (rows 1 …) of (R, …) values."""
    tail = (1.0 - LEVEL) / 2.0
    low, high = np.quantile(values[1:], [tail, 1.0 - tail], axis=0)
    return low, high


def proxies(moments: ScoreMoments, drawn: Floats, unweighted: int, groups_per_batch: float) -> Proxies | None:
    """Estimates every setting's error; None if there is only one block or no advantage differs from zero.

    Args:
        moments: sums of the whole replay.
        drawn: (R, K') from `draws`, for the K' blocks that contain a group.
        unweighted: index of the setting without weight and rejection; its noise is measured.
        groups_per_batch: G.
    """
    used = moments.counts[0] > 0
    if used.sum() < 2 or moments.exact_energy[0].sum() <= 0.0:
        return None
    mean_product = (drawn @ moments.product[0][used]) / (drawn @ moments.counts[1][used])
    surrogate = _surrogate(moments, used, drawn, mean_product)
    prior = _prior(moments, used, drawn, mean_product)

    groups, product = moments.counts[0].sum(), moments.product.sum(1)
    ess = product[0] ** 2 / (moments.counts[1].sum() * product[1])
    trust = groups * ess / (groups * ess + groups_per_batch)
    own = np.maximum(surrogate.noise - np.maximum(surrogate.norm[:, [unweighted]], 0.0), 1e-300)
    noise_one = own / prior.noise[:, [unweighted]]  # noise of an on-policy group of the same energy

    squared = trust * np.maximum(surrogate.squared, 0.0) + (1.0 - trust) * noise_one / PRIOR_NOISE
    along = trust * (surrogate.along - prior.kept * surrogate.squared)
    lengths = moments.counts[2].sum() / moments.counts[1].sum()
    aligned = min(1.0, PRIOR_ALIGNED / lengths)
    off = trust * (surrogate.norm - 2.0 * prior.kept * surrogate.along + prior.kept**2 * surrogate.squared)
    off = off + (1.0 - trust) * aligned * prior.spread * squared
    off = np.maximum(off, along**2 / squared)  # Cauchy-Schwarz
    inner = prior.kept * squared + along
    norm = prior.kept**2 * squared + 2.0 * prior.kept * along + off
    noise = prior.noise * noise_one / groups_per_batch
    return Proxies(_error(inner / squared, norm / squared, noise / squared), float(trust))


@dataclass(frozen=True, slots=True)
class _Surrogate:
    """Per resample and setting: m·g and |m|²; per resample: |g|² (R, 1) and the noise of a group (R, 1)."""

    along: Floats
    norm: Floats
    squared: Floats
    noise: Floats


def _surrogate(moments: ScoreMoments, used: Floats, drawn: Floats, mean: Floats) -> _Surrogate:
    """Estimates products of expected gradients without bias, by products of gradients of different blocks."""
    gradient, exact, squares = moments.centred()
    gradient, exact, squares = gradient[:, used], exact[used], squares[used]
    groups = drawn * moments.counts[0][used]
    count = groups.sum(1)
    # Pairs of groups of different blocks; a resample of one block has none, and all its products are 0.
    pairs = np.maximum(count**2 - np.square(groups).sum(1), 1e-300)[:, None]
    others = 1.0 - np.eye(len(exact))

    def products(table: Floats) -> Floats:  # (…, K, K) → (R, …)
        found: Floats = np.einsum("rk,...kl,rl->r...", drawn, table * others, drawn, optimize=True)
        return found

    cross = gradient @ exact.T
    along = products(cross) / pairs / mean[:, None]
    norm = products(gradient @ gradient.transpose(0, 2, 1)) / pairs
    squared = products(exact @ exact.T)[:, None] / pairs / mean[:, None] ** 2
    noise = (drawn @ squares)[:, None] / count[:, None]
    return _Surrogate(along, norm, squared, noise)


@dataclass(frozen=True, slots=True)
class _Prior:
    """Per resample and setting; weighted by e = A²κ² and relative to the exact gradient's energy."""

    kept: Floats  # mean of w / W under π_train: the share of the gradient that is kept
    #: mean square of (w − kept·W)/((1 + W)/2) under ½ π_train + ½ π_rollout: the unevenness of the weights.
    #: Under this mixture it is bounded where one policy has almost no mass
    spread: Floats
    noise: Floats  # mean of w² under π_rollout


def _prior(moments: ScoreMoments, used: Floats, drawn: Floats, mean: Floats) -> _Prior:
    energy = np.einsum("sik,rk->irs", moments.energy[:, :, used], drawn)
    exact, exact_halfway = moments.exact_energy[:, used] @ drawn.T
    exact = (np.maximum(exact, 1e-300) / mean)[:, None]
    kept, noise, square, mixed = energy / exact
    raw = kept / mean[:, None]  # relative to the unnormalised W, whose sample mean is not 1
    spread = square - 2.0 * raw * mixed + raw**2 * exact_halfway[:, None] / exact
    return _Prior(kept, np.maximum(spread, 0.0), np.maximum(noise, 1e-300))


def _error(inner: Floats, norm: Floats, noise: Floats) -> Floats:
    """Computes errors from m·g, |m|² and V/G, all divided by |g|²; near 1 if a setting keeps nothing."""
    useful = inner > 1e-12  # otherwise the gradient is zero or opposes g: no learning rate helps
    signal = np.square(np.where(useful, inner, 1.0))
    total = np.maximum(norm / signal - 1.0, 0.0) + noise / signal  # bias² and variance
    total = np.where(useful, np.minimum(total, FAR), FAR)
    error: Floats = total / (1.0 + total)
    return error
