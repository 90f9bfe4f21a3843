"""A test, with a guarantee, of whether tokens were drawn with the log-probs that were reported for them.

Let ρ = π_train / π_reported of a token. If the token is drawn from π_reported, the mean of ρ, given all that
comes before it, is π_train's mass on the sampler's support: at most 1, however stale the sampler is. For bets
λ > 0 and a tolerance ε the product of the factors 1 + λ (ρ_t − 1 − ε) is then a non-negative supermartingale
that starts at 1, and so is its mean over several λ. By Ville's inequality P(it ever reaches 1/α) ≤ α: the
alarm holds however often one looks. Sources: Ville 1939, "Étude critique de la notion de collectif";
Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting".

The guarantee needs that π_train is fixed before the token is drawn, and that which tokens are read does not
depend on what was drawn. A token that was drawn and not scored counts as ρ = 0, the smallest value, which
only lowers the product.

A product loses about ½ λ² Var ρ a token while nothing is wrong, so that a late fault would be found late.
Every batch k = 0, 1, … therefore puts the share 1/((k+1)(k+2)) of the first stake into play anew, which is a
mixture of supermartingales, and one itself.

The other direction, a mean of ρ below 1, has no such guarantee without a bound on ρ. It is measured by
z = Σ(ρ − 1) / √Σ(ρ − 1)²; 1 − mean ρ estimates π_train's mass outside the sampler's support.
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

#: Names of the sums: logs of the products, one per bet; Σ(ρ − 1), Σ(ρ − 1)², and the number of tokens scored.
_GROWTH = tuple(f"sampler_test.growth_{number}" for number in range(len(BETS)))
_GAP, _SQUARE, _COUNT = "sampler_test.gap", "sampler_test.square", "sampler_test.count"


def sampler_sums(log_ratio: Tensor) -> Sums:
    """Sums over tokens in any order; those of parts and ranks are added.

    Args:
        log_ratio: (M,) log π_train − log π_reported, nats. NaN: ρ = 0.
    """
    ratio = log_ratio.double().clamp(max=_LARGEST_LOG_RATIO).exp().nan_to_num(nan=0.0)
    gap = ratio - 1.0
    sums: Sums = {_GAP: gap.sum(), _SQUARE: gap.square().sum(), _COUNT: gap.new_tensor(float(len(gap)))}
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


def unit_mean(sums: HostSums) -> tuple[float, float | None]:
    """Mean of ρ − 1, and z; None: there is no token, or every ratio is 1 up to rounding: nothing to test."""
    if not sums[_COUNT] or math.sqrt(sums[_SQUARE] / sums[_COUNT]) < _ROUNDING:
        return 0.0, None
    return sums[_GAP] / sums[_COUNT], sums[_GAP] / math.sqrt(sums[_SQUARE])


def num_scored(sums: HostSums) -> int:
    """Number of tokens of the sums."""
    return int(sums[_COUNT])


def _log_sum(logs: Sequence[float]) -> float:
    """log Σ exp."""
    largest = max(logs)
    if math.isinf(largest):
        return largest
    return largest + math.log(sum(math.exp(value - largest) for value in logs))
