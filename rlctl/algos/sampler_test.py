"""A test, with a guarantee, of whether tokens were drawn with the log-probs that were reported for them.

Let ρ = π_train / π_reported of a token. If the token is drawn from π_reported, the mean of ρ, given all that
comes before it, is π_train's mass on the sampler's support: at most 1, however stale the sampler is. For bets
λ > 0 and a tolerance ε the product of the factors 1 + λ (ρ_t − 1 − ε) is then a non-negative supermartingale
that starts at 1, and so is its mean over several λ. By Ville's inequality P(it ever reaches 1/α) ≤ α: the
alarm holds however often one looks. Sources: Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", arXiv 2010.09686 (tests by betting, Ville's inequality); Howard, Ramdas, McAuliffe and
Sekhon 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences" (mixtures of supermartingales).

The guarantee needs that π_train is fixed before the token is drawn, and that which tokens are read does not
depend on what was drawn. A token that was drawn and not scored counts as ρ = 0, the smallest value, which
only lowers the product.

A product loses about ½ λ² Var ρ a token while nothing is wrong, so that a late fault would be found late.
Every batch k = 0, 1, … therefore puts the share 1/((k+1)(k+2)) of the first stake into play anew, which is a
mixture of supermartingales, and one itself. Sums of processes that start at successive times are the
"e-detectors" of Shin, Ramdas and Rinaldo 2022, arXiv 2203.03532; unlike theirs, the shares here add up to 1,
which bounds the probability of any false alarm, not their frequency.

The other direction, a mean of ρ below 1, has no such guarantee without a bound on ρ. It is measured by
z = Σ(ρ − 1) / √Σ(ρ − 1)²; 1 − mean ρ estimates π_train's mass outside the sampler's support. The largest ρ
are rare, so that without them an honest sampler's z is below 0, the more so the more ρ varies: the critical
value (`CRITICAL_Z`) is simulated for log-normal ρ with the spread of the tokens' own log ρ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlctl.algos.segments import HostSums, Sums
from rlctl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: λ of the bets.
BETS = (0.003, 0.01, 0.03, 0.1, 0.3)
#: ε: kernels of sampler and trainer differ by harmless amounts that any test would find in 10⁸ tokens.
TOLERANCE = 1e-4
#: Upper bound of the log-ratio; a smaller factor keeps the product a supermartingale.
_LARGEST_LOG_RATIO = 20.0
#: Root mean square of ρ − 1 below which the two log-probs are equal up to rounding in float32.
_ROUNDING = 1e-5
#: Largest spread of log ρ → the z that 1 of 10,000 honest dumps falls below, the lowest over 100 to 10,000
#: tokens (benchmarks/sampler_test.py critical).
CRITICAL_Z = {0.1: -3.8, 0.2: -4.0, 0.3: -4.2, 0.5: -5.0, 0.7: -6.0, 1.0: -8.0}
#: Missing probability below which nothing is called cut: kernels round, which 10⁷ tokens would show.
_LEAST_CUT = 1e-3

#: Names of the sums: logs of the products, one per bet; Σ(ρ − 1), Σ(ρ − 1)², and the number of tokens scored.
_GROWTH = tuple(f"sampler_test.growth_{number}" for number in range(len(BETS)))
_GAP, _SQUARE, _COUNT = "sampler_test.gap", "sampler_test.square", "sampler_test.count"
#: Σ log ρ and Σ (log ρ)².
_LOG, _LOG_SQUARE = "sampler_test.log", "sampler_test.log_square"


def sampler_sums(log_ratio: Tensor) -> Sums:
    """Sums over tokens in any order; those of parts and ranks are added.

    Args:
        log_ratio: (M,) log π_train − log π_reported, nats. NaN: ρ = 0.
    """
    ratio = log_ratio.double().clamp(max=_LARGEST_LOG_RATIO).exp().nan_to_num(nan=0.0)
    gap = ratio - 1.0
    sums: Sums = {_GAP: gap.sum(), _SQUARE: gap.square().sum(), _COUNT: gap.new_tensor(float(len(gap)))}
    logs = log_ratio.double().nan_to_num(nan=0.0).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    sums |= {_LOG: logs.sum(), _LOG_SQUARE: logs.square().sum()}
    for name, bet in zip(_GROWTH, BETS, strict=True):
        sums[name] = torch.log1p(bet * (gap - TOLERANCE)).sum()
    return sums


def with_unscored(sums: HostSums, count: int) -> HostSums:
    """The sums with `count` further tokens that were drawn and not scored: for each ρ = 0."""
    losses = {
        name: count * math.log1p(-bet * (1.0 + TOLERANCE)) for name, bet in zip(_GROWTH, BETS, strict=True)
    }
    return sums | {name: sums[name] + loss for name, loss in losses.items()}


@dataclass(frozen=True, slots=True)
class Wealth:
    """The mean product over all bets and starts, after some batches.

    Attributes:
        log_stakes: for each bet, log of the sum over starts of share × product since that start.
        num_batches: number of batches so far.
    """

    log_stakes: tuple[float, ...] = field(default=(-math.inf,) * len(BETS))
    num_batches: int = 0

    def after(self, sums: HostSums) -> Wealth:
        """The wealth after one more batch, from its `sampler_sums` over all ranks."""
        log_share = -math.log((self.num_batches + 1) * (self.num_batches + 2))
        stakes = [_log_sum((stake, log_share)) for stake in self.log_stakes]
        growths = [sums[name] for name in _GROWTH]
        grown = tuple(stake + growth for stake, growth in zip(stakes, growths, strict=True))
        return Wealth(grown, self.num_batches + 1)

    @property
    def log_value(self) -> float:
        """Natural logarithm of the wealth; it starts at 0."""
        not_in_play = -math.log(self.num_batches + 1)
        return _log_sum((_log_sum(self.log_stakes) - math.log(len(BETS)), not_in_play))


@dataclass(frozen=True, slots=True)
class UnitMean:
    """How far the mean of ρ is from 1.

    Attributes:
        gap: mean of ρ − 1.
        z: Σ(ρ − 1)/√Σ(ρ − 1)²; None: there is no token, or every ratio is 1 up to rounding: nothing to test.
        spread: standard deviation of log ρ, nats.
    """

    gap: float
    z: float | None
    spread: float

    @property
    def is_cut(self) -> bool:
        """Whether the mean is so far below 1 that tokens of the trained policy must be missing."""
        critical = critical_z(self.spread)
        if self.z is None or critical is None or -self.gap < _LEAST_CUT:
            return False
        return self.z < critical


def unit_mean(sums: HostSums) -> UnitMean:
    """The mean of ρ, from `sampler_sums`."""
    count = sums[_COUNT]
    if not count or math.sqrt(sums[_SQUARE] / count) < _ROUNDING:
        return UnitMean(0.0, None, 0.0)
    mean_log = sums[_LOG] / count
    spread = math.sqrt(max(sums[_LOG_SQUARE] / count - mean_log**2, 0.0))
    return UnitMean(sums[_GAP] / count, sums[_GAP] / math.sqrt(sums[_SQUARE]), spread)


def critical_z(spread: float) -> float | None:
    """The z that an honest sampler falls below in one of 10,000 dumps, or more rarely.

    Args:
        spread: standard deviation of log ρ, nats.

    Returns:
        That of the next larger spread in `CRITICAL_Z`; None: the tokens vary too much to judge.
    """
    return next((z for largest, z in CRITICAL_Z.items() if spread <= largest), None)


def num_scored(sums: HostSums) -> int:
    """Number of tokens of the sums."""
    return int(sums[_COUNT])


def _log_sum(logs: Sequence[float]) -> float:
    """log Σ exp."""
    largest = max(logs)
    if math.isinf(largest):
        return largest
    return largest + math.log(sum(math.exp(value - largest) for value in logs))
