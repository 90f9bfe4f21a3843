"""Choice of the correction weight from the estimated error of the gradient.

For each candidate weight, with group gradients x_j under it and y_j under exact sequence weights, averages
over pairs j ≠ k and over batches estimate the moments of `rlctl.algos.gradient_error`. The candidate with the
smallest error is used for the next batch. benchmarks/auto_correction.py compares this with fixed weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
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
    """Moments of the group gradients x_j of one weight, scaled so that E|x|² = E|y|² = 1.

    The scales make batches comparable: large weights W in one batch do not dominate the averages.

    Attributes:
        norm: |E x|².
        inner: E x · E y.
        signal: |E y|².
    """

    norm: float
    inner: float
    signal: float

    @classmethod
    def of(cls, used: Tensor, exact: Tensor) -> CandidateMoments:
        """Estimates from G ≥ 2 independent groups; `used` and `exact` are (G, K)."""
        groups = len(used)
        used, exact = (
            x / x.square().sum(1).mean().sqrt().clamp(min=1e-30) for x in (used.double(), exact.double())
        )

        def over_pairs(x: Tensor, y: Tensor) -> float:
            return float(x.sum(0) @ y.sum(0) - (x * y).sum()) / (groups * (groups - 1))

        return cls(over_pairs(used, used), over_pairs(used, exact), over_pairs(exact, exact))

    def merit(self, num_groups: float) -> float:
        """(1 − error) · |E y|² of a mini-batch of `num_groups` groups, with the error of `gradient_error`.

        |E y|² is the same for all candidates, and its estimate may be negative: the order does not need it.
        """
        norm = max(self.norm, 0.0)
        return max(self.inner, 0.0) ** 2 / (norm + (1.0 - norm) / num_groups)

    @property
    def squared_cosine(self) -> float | None:
        """cos² of the angle between E x and E y, in [0.1, 1]; None if the moments do not define it."""
        if self.norm <= 0 or self.signal <= 0:
            return None
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


def choose(means: Mapping[str, CandidateMoments], num_groups: float, last: AutoChoice) -> AutoChoice:
    """The candidate with the smallest error; its squared cosine scales the learning rate.

    Values that the moments do not determine are kept from the last choice.
    """
    merits = {name: moments.merit(num_groups) for name, moments in means.items()}
    best = max(merits, key=lambda name: merits[name]) if any(merits.values()) else last.name
    cosine = means[best].squared_cosine if best in means else None
    return AutoChoice(best, last.lr_scale if cosine is None else cosine)


def _mixed(old: CandidateMoments, new: CandidateMoments) -> CandidateMoments:
    pairs = zip(astuple(old), astuple(new), strict=True)
    return CandidateMoments(*(_DECAY * before + (1.0 - _DECAY) * now for before, now in pairs))
