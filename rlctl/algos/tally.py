"""Sums that merge: reduce first, divide once.

`Tally` holds sums and maxima of one part of a batch, on the device. Parts add up; two collectives
merge ranks; one transfer brings everything to the host as a `HostTally`, whose figures are those of
the whole, never an average of the parts' figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums and maxima on the device, all () float64, under fixed names.

    Minima are kept as maxima of the negated value, so that a whole tally merges with one sum and
    one maximum.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    def __add__(self, other: Tally) -> Tally:
        """The tally of both parts together."""
        return Tally(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: torch.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )

    def pack(self) -> tuple[Tensor, Tensor]:
        """All sums and all maxima, each one float64 vector (maxima may be none), to be reduced over ranks."""
        sums = torch.stack(list(self.sums.values()))
        return sums, torch.stack(list(self.maxima.values())) if self.maxima else sums.new_zeros(0)

    def to_host(self, packed: tuple[Tensor, Tensor] | None = None) -> HostTally:
        """Bring everything (or what `pack` gave, after reduction) over in one transfer."""
        sums, maxima = packed or self.pack()
        values = torch.cat([sums, maxima]).tolist()
        return HostTally(
            dict(zip(self.sums, values[: len(sums)], strict=True)),
            dict(zip(self.maxima, values[len(sums) :], strict=True)),
        )


class TallyBuilder:
    """Names for the sums of one family of values: count, Σx, Σx², max, −min.

    Where x is summed as a distance from 1, `powers` adds Σw and Σw² of w = 1 + x itself. Distances keep the
    variance near 1; powers keep mean and effective sample size of weights that are all far from 1, where the
    distances cancel. Clamped weights lie in e^±20: float64 holds their squares and sums at full precision.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def family(
        self, name: str, count: Tensor, total: Tensor, squares: Tensor, high: Tensor, low: Tensor, who: Tensor
    ) -> None:
        """Row vectors (B,): `who` takes part; `count` values in the row, their sums and extremes."""
        sums = torch.where(who, torch.stack([count, total, squares]), 0.0).sum(-1)
        maxima = torch.where(who, torch.stack([high, -low]), -math.inf).amax(-1)
        self.sums |= zip((f"{name}.n", f"{name}.s1", f"{name}.s2"), sums, strict=True)
        self.maxima |= zip((f"{name}.max", f"{name}.min"), maxima, strict=True)

    def powers(self, name: str, total: Tensor, squares: Tensor, who: Tensor) -> None:
        """Row vectors (B,): Σw and Σw² of the values in the row."""
        sums = torch.where(who, torch.stack([total, squares]), 0.0).sum(-1)
        self.sums |= zip((f"{name}.p1", f"{name}.p2"), sums, strict=True)

    def per_sequence(
        self, name: str, values: Tensor, who: Tensor, centre: float = 0.0, at: Tensor | None = None
    ) -> None:
        """One value per sequence, as a distance from `centre`; `at`: the value itself, where it is known."""
        at = values + centre if at is None else at
        self.family(name, torch.ones_like(values), values, values.square(), at, at, who)
        if centre:
            self.powers(name, at, at.square(), who)


# --- on the host ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, Σ(x − centre), Σ(x − centre)², Σx, Σx², extremes of one family of values."""

    count: float
    s1: float
    s2: float
    p1: float
    p2: float
    high: float
    low: float

    @property
    def mean(self) -> float:
        """Mean; 0.0 of nothing."""
        return self.p1 / self.count if self.count else 0.0

    @property
    def mean_square(self) -> float:
        """Mean of x²; 0.0 of nothing."""
        return self.p2 / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self._variance()) if self.count else 0.0

    @property
    def sample_std(self) -> float:
        """Standard deviation with n − 1 (verl's choice for per-sequence figures)."""
        return math.sqrt(self._variance() * self.count / (self.count - 1)) if self.count > 1 else 0.0

    def _variance(self) -> float:
        if self.count == 1:
            return 0.0  # exactly, whatever rounding left in the squares
        first, second = (self.p1, self.p2) if self.mean < 0.5 else (self.s1, self.s2)
        return max(second / self.count - (first / self.count) ** 2, 0.0)

    @property
    def ess(self) -> float:
        """Effective sample size (Σw)² / (n Σw²) ∈ (0, 1]; 0.0 when every weight is zero.

        Source: Kish 1965; Owen, "Monte Carlo theory, methods and examples", section 9.3.
        """
        if not self.p2 > 0:
            return 0.0
        return min(self.p1**2 / (self.count * self.p2), 1.0)  # rounding could lift equal weights above 1

    @property
    def max(self) -> float:
        """Largest value; 0.0 of nothing."""
        return self.high if self.count else 0.0

    @property
    def min(self) -> float:
        """Smallest value; 0.0 of nothing."""
        return self.low if self.count else 0.0


@dataclass(frozen=True, slots=True)
class HostTally:
    """A tally as plain numbers: of one mini-batch, or of several merged."""

    sums: dict[str, float]
    maxima: dict[str, float]

    def __add__(self, other: HostTally) -> HostTally:
        """The tally of both mini-batches together."""
        return HostTally(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: max(value, other.maxima[name]) for name, value in self.maxima.items()},
        )

    def moments(self, name: str, centre: float = 0.0) -> Moments:
        """The family `name`, whose values were summed as distances from `centre`."""
        count, s1, s2 = (self.sums[f"{name}.{part}"] for part in ("n", "s1", "s2"))
        p1 = self.sums.get(f"{name}.p1", s1 + centre * count)
        p2 = self.sums.get(f"{name}.p2", s2 + 2.0 * centre * s1 + centre**2 * count)
        return Moments(count, s1, s2, p1, p2, self.maxima[f"{name}.max"], -self.maxima[f"{name}.min"])

    def per(self, name: str, count: str) -> float:
        """A sum divided by a count; 0.0 of nothing."""
        return self.sums[name] / self.sums[count] if self.sums[count] else 0.0
