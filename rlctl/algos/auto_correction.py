"""Choice of the correction weight from the estimated error of the gradient.

For each candidate weight, with group gradients x_j under it and y_j under exact sequence weights, averages
over pairs j ≠ k and over batches estimate the moments of `rlctl.algos.gradient_error`. The candidate with the
smallest error is used for the next batch. benchmarks/auto_correction.py compares this with fixed weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlctl.algos.rules import WeightRule

if TYPE_CHECKING:
    from torch import Tensor

#: The weights that `auto` chooses from; the first one is used until there is an estimate.
CANDIDATES: dict[str, WeightRule] = {"none": WeightRule(None)} | {
    f"{level}_{upper}": WeightRule(level, "truncate", upper=float(upper))
    for level in ("token", "sequence")
    for upper in (2, 5)
}
#: Weight of the moments so far, at each new batch.
_DECAY = 0.9
#: Lowest factor of the learning rate.
_LOWEST = 0.1


@dataclass(frozen=True, slots=True)
class CandidateMoments:
    """Moments of the group gradients x_j of one weight; any common scale of x or of y cancels.

    Attributes:
        norm: |E x|².
        inner: E x · E y.
        signal: |E y|².
        square: E |x|².
    """

    norm: float
    inner: float
    signal: float
    square: float

    @classmethod
    def of(cls, used: Tensor, exact: Tensor) -> CandidateMoments:
        """Unbiased estimates from G ≥ 2 independent groups; `used` and `exact` are (G, K)."""
        used, exact = used.double(), exact.double()
        groups = len(used)

        def over_pairs(x: Tensor, y: Tensor) -> float:
            return float(x.sum(0) @ y.sum(0) - (x * y).sum()) / (groups * (groups - 1))

        square = float(used.square().sum()) / groups
        return cls(over_pairs(used, used), over_pairs(used, exact), over_pairs(exact, exact), square)

    def error(self, num_groups: float) -> float:
        """Relative mean-squared error of a mini-batch of `num_groups` groups, see `gradient_error`."""
        spread = self.signal * (self.norm + (self.square - self.norm) / num_groups)
        return 1.0 - max(self.inner, 0.0) ** 2 / spread if spread > 0 else 1.0

    @property
    def squared_cosine(self) -> float:
        """cos² of the angle between E x and E y, at least 0.1; 1 if the moments do not define it."""
        if self.norm <= 0 or self.signal <= 0:
            return 1.0
        return min(max(max(self.inner, 0.0) ** 2 / (self.norm * self.signal), _LOWEST), 1.0)


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """The weight of the next batch and the factor of its learning rate."""

    name: str = next(iter(CANDIDATES))
    lr_scale: float = 1.0


def averaged(
    means: Mapping[str, CandidateMoments], batch: Mapping[str, CandidateMoments]
) -> dict[str, CandidateMoments]:
    """Moving averages of the moments of each candidate, after one more batch."""
    return {**means, **{name: _mixed(means.get(name, new), new) for name, new in batch.items()}}


def choose(means: Mapping[str, CandidateMoments], num_groups: float) -> AutoChoice:
    """The candidate with the smallest error; its squared cosine scales the learning rate."""
    if not means:
        return AutoChoice()
    best = min(means, key=lambda name: means[name].error(num_groups))
    return AutoChoice(best, means[best].squared_cosine)


def _mixed(old: CandidateMoments, new: CandidateMoments) -> CandidateMoments:
    pairs = ((getattr(old, name), getattr(new, name)) for name in CandidateMoments.__dataclass_fields__)
    return CandidateMoments(*(_DECAY * before + (1.0 - _DECAY) * now for before, now in pairs))
