"""Additive sums for metrics: reduce first, divide once.

A record of sums describes one part of a batch, on the device. Records of several parts are added; two
collectives merge those of all ranks; one transfer copies everything to the host, as the same record of
floats. Metrics are computed from the total, never as an average of the parts' metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Generic, Self, TypeVar, cast

import torch
from torch import Tensor

#: () float64 tensors on the device, floats on the host.
V = TypeVar("V", Tensor, float)


#: What a record contains besides None and other records.
_VALUES = (Tensor, float, int)
#: Metadata of a field that merges by maximum; all other fields are added.
LARGEST = {"largest": True}


class Additive:
    """Base of frozen dataclasses of sums: numbers, None, or tuples, dicts and records of these."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        """Merges the records of two parts."""
        pairs = zip(_leaves(self), _leaves(other), strict=True)
        merged = iter([_merge(a, b) if is_max else a + b for (a, is_max), (b, _) in pairs])
        return cast(Self, _rebuilt(self, merged, merged))

    @classmethod
    def merged(cls, parts: Sequence[Self]) -> Self:
        """Merges the records of all parts, which are on the device."""
        if len(parts) == 1:
            return parts[0]
        sums, maxima = zip(*(part.as_vectors() for part in parts), strict=True)
        merged = torch.stack(sums).sum(0).unbind(), torch.stack(maxima).amax(0).unbind()
        return cast(Self, parts[0].with_values(*merged))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenates the rows of all parts, in float64; fields are (B,)."""
        rows = torch.cat([torch.stack([x for x, _ in _leaves(part)]) for part in parts], 1)
        joined = iter(rows.double().unbind())
        return cast(Self, _rebuilt(parts[0], joined, joined))

    def where(self, chosen: Tensor) -> Self:
        """The record with 0.0, or −∞ for a maximum, where `chosen` (B,) is False; fields are (B,)."""
        sums, maxima = self.as_vectors()
        values = torch.where(chosen, sums, 0.0), torch.where(chosen, maxima, -math.inf)
        return cast(Self, self.with_values(*(rows.unbind() for rows in values)))

    def over_rows(self) -> Self:
        """Reduces a per-row record, whose fields are (B,), to the record of the batch."""
        sums, maxima = self.as_vectors()
        return cast(Self, self.with_values(sums.sum(-1).unbind(), maxima.amax(-1).unbind()))

    def over(self, count: float) -> Self:
        """The record of floats with every sum divided by `count`; maxima stay."""
        leaves = list(_leaves(self))
        sums = [value / count for value, is_max in leaves if not is_max]
        return cast(Self, self.with_values(sums, [value for value, is_max in leaves if is_max]))

    def as_vectors(self) -> tuple[Tensor, Tensor]:
        """All sums and all maxima, one float64 vector each (that of maxima may be empty)."""
        leaves = list(_leaves(self))
        sums = torch.stack([value for value, is_max in leaves if not is_max])
        maxima = [value for value, is_max in leaves if is_max]
        return sums, torch.stack(maxima) if maxima else sums.new_zeros(0)

    def with_values(self, sums: Sequence[Any], maxima: Sequence[Any]) -> Any:
        """A record of this structure with other values, in the order of `as_vectors`."""
        return _rebuilt(self, iter(sums), iter(maxima))

    def to_host(self, vectors: tuple[Tensor, Tensor] | None = None) -> Any:
        """The record as floats, in one transfer; `vectors`: its `as_vectors` after reduction over ranks."""
        sums, maxima = vectors or self.as_vectors()
        values = torch.cat([sums, maxima]).tolist()
        return self.with_values(values[: len(sums)], values[len(sums) :])


@cache
def _fields(record: Any) -> list[tuple[str, bool]]:
    """Name of each field, and whether it merges by maximum."""
    return [(part.name, part.metadata.get("largest", False)) for part in fields(record)]


def _children(node: Any, is_max: bool) -> list[tuple[Any, bool]]:
    """What a record, tuple or dict contains, and whether it merges by maximum."""
    if isinstance(node, Additive):
        return [(getattr(node, name), largest) for name, largest in _fields(type(node))]  # type: ignore[arg-type]
    return [(value, is_max) for value in (node.values() if isinstance(node, dict) else node)]


def _leaves(node: Any, is_max: bool = False) -> list[tuple[Any, bool]]:
    """Each value of a record, and whether it merges by maximum."""
    found: list[tuple[Any, bool]] = []
    for value, largest in _children(node, is_max):
        if isinstance(value, _VALUES):
            found.append((value, largest))
        elif value is not None:
            found += _leaves(value, largest)
    return found


def _rebuilt(node: Any, sums: Iterator[Any], maxima: Iterator[Any], is_max: bool = False) -> Any:
    """The same record with other values, in the order of `_leaves`."""

    def new(value: Any, largest: bool) -> Any:
        if isinstance(value, _VALUES):
            return next(maxima if largest else sums)
        return None if value is None else _rebuilt(value, sums, maxima, largest)

    values = [new(*child) for child in _children(node, is_max)]
    if isinstance(node, dict):
        return dict(zip(node, values, strict=True))
    return tuple(values) if isinstance(node, tuple) else type(node)(*values)


def _merge(a: Any, b: Any) -> Any:
    return torch.maximum(a, b) if isinstance(a, Tensor) else max(a, b)


@dataclass(frozen=True, slots=True)
class Moments(Additive, Generic[V]):
    """Moments of values x.

    Sums of both x and x − 1 are kept: the first preserve mean and effective sample size if all values are
    tiny, the second preserve the variance if values are near 1.
    """

    count: V
    total: V  # Σx
    squares: V  # Σx²
    offset: V  # Σ(x − 1)
    offset_squares: V  # Σ(x − 1)²
    highest: V = field(metadata=LARGEST)
    negated_lowest: V = field(metadata=LARGEST)  # minima merge as maxima of −x

    @property
    def mean(self: Moments[float]) -> float:
        """Mean; 0.0 if there are no values."""
        return self.total / self.count if self.count else 0.0

    @property
    def mean_square(self: Moments[float]) -> float:
        """Mean of x²; 0.0 if there are no values."""
        return self.squares / self.count if self.count else 0.0

    @property
    def std(self: Moments[float]) -> float:
        """Population standard deviation."""
        return math.sqrt(self._variance()) if self.count else 0.0

    @property
    def sample_std(self: Moments[float]) -> float:
        """Standard deviation with n − 1."""
        return math.sqrt(self._variance() * self.count / (self.count - 1)) if self.count > 1 else 0.0

    def _variance(self: Moments[float]) -> float:
        if self.count == 1:
            return 0.0  # exact, without the rounding error of the squares
        sums = (self.total, self.squares) if self.mean < 0.5 else (self.offset, self.offset_squares)
        first, second = (value / self.count for value in sums)
        return max(second - first**2, 0.0)

    @property
    def ess(self: Moments[float]) -> float:
        """Effective sample size (Σx)² / (n Σx²) ∈ (0, 1]; 0.0 when every weight is zero.

        Source: Kish 1965; Owen, "Monte Carlo theory, methods and examples", chapter 9.
        """
        if not self.squares > 0:
            return 0.0
        # For equal weights, rounding could make it exceed 1.
        return min(self.total**2 / (self.count * self.squares), 1.0)

    @property
    def max(self: Moments[float]) -> float:
        """Largest value; 0.0 if there are no values."""
        return self.highest if self.count else 0.0

    @property
    def min(self: Moments[float]) -> float:
        """Smallest value; 0.0 if there are no values."""
        return -self.negated_lowest if self.count else 0.0

    def divided(self: Moments[float], factor: float) -> Moments[float]:
        """Moments of x / factor, factor > 0."""
        n = self.count
        first = self.offset + n * (1.0 - factor)  # Σ(x − factor)
        second = self.offset_squares + 2.0 * (1.0 - factor) * self.offset + n * (1.0 - factor) ** 2
        if factor < 0.5:  # the sums of x − 1 would lose precision by cancellation
            first = self.total - n * factor
            second = self.squares - 2.0 * factor * self.total + n * factor**2
        return Moments(
            n,
            self.total / factor,
            self.squares / factor**2,
            first / factor,
            second / factor**2,
            self.highest / factor,
            self.negated_lowest / factor,
        )


def moments_of(values: Tensor, where: Tensor) -> Moments[Tensor]:
    """Moments in float64 of the values where `where` (bool, of their shape) is True."""
    x = torch.where(where, values.double(), 0.0)
    powers = torch.stack([torch.ones_like(x), x, x.square(), x - 1.0, (x - 1.0).square()])
    sums = (powers * where.double()).flatten(1).sum(-1)
    extremes = torch.where(where, torch.stack([x, -x]), -math.inf).flatten(1).amax(-1)
    return Moments(*sums.unbind(), *extremes.unbind())


def ratio(total: float, count: float) -> float:
    """A sum divided by a count; 0.0 if the count is 0."""
    return total / count if count else 0.0
