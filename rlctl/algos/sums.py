"""Sums for metrics: reduce first, divide once.

A dict of named () float64 sums describes one part of a batch, on the device. Parts are added; `Ranks.to_host`
merges all ranks and gives floats. Metrics are computed from the total, never as an average of the parts'
metrics. A name that ends with `.max` merges by maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Sums = dict[str, Tensor]
HostSums = dict[str, float]
LARGEST = ".max"
#: Sums of values x: their number, Σx, Σx², the largest and the smallest (as the largest of −x).
_MOMENTS = (".n", ".x", ".xx", f".high{LARGEST}", f".low{LARGEST}")


def added(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of all parts, which have the same names; tensors or floats."""

    def merged(name: str) -> Any:
        values = [part[name] for part in parts]
        if not name.endswith(LARGEST):
            return sum(values[1:], values[0])
        return torch.stack(values).amax() if isinstance(values[0], Tensor) else max(values)

    return {name: merged(name) for name in parts[0]}


def to_host(sums: Sums) -> HostSums:
    """The sums as floats, in one transfer."""
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def ratio(total: float, count: float) -> float:
    """A sum divided by a count; 0.0 if the count is 0."""
    return total / count if count else 0.0


def moments(name: str, values: Tensor, n: Tensor | None = None, *, zeros: Tensor | int = 0) -> Sums:
    """Sums `name.*` of values (K,), from which `Moments` is read.

    Args:
        n: (K,) multiplicity of each value; None: 1.
        zeros: number of further values that are 0.
    """
    x = values.double()
    weighted = x if n is None else x * n
    count = x.new_tensor(len(x)) if n is None else n.double().sum()
    there = x if n is None else x[n > 0]
    edge = torch.where(torch.as_tensor(zeros, device=x.device) > 0, 0.0, -math.inf).double()
    low, high = there.aminmax() if len(there) else (-edge, edge)
    found = count + zeros, weighted.sum(), weighted @ x, high.maximum(edge), (-low).maximum(edge)
    return {f"{name}{part}": value for part, value in zip(_MOMENTS, found, strict=True)}


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of values x, see `moments`; 0.0 if there are no values."""

    count: float
    total: float  # Σx
    squares: float  # Σx²
    highest: float
    negated_lowest: float

    @classmethod
    def read(cls, sums: HostSums, name: str) -> Moments:
        """The moments that `moments` wrote under this name."""
        return cls(*(sums[f"{name}{part}"] for part in _MOMENTS))

    @property
    def mean(self) -> float:
        """Mean."""
        return ratio(self.total, self.count)

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(max(ratio(self.squares, self.count) - self.mean**2, 0.0)) if self.count > 1 else 0.0

    @property
    def sample_std(self) -> float:
        """Standard deviation with n − 1."""
        return self.std * math.sqrt(self.count / (self.count - 1)) if self.count > 1 else 0.0

    @property
    def ess(self) -> float:
        """Effective sample size (Σx)² / (n Σx²) ∈ (0, 1]; 0.0 when every weight is zero.

        Source: Kish 1965; Owen, "Monte Carlo theory, methods and examples", chapter 9.
        """
        # For equal weights, rounding could make it exceed 1.
        return min(self.total**2 / (self.count * self.squares), 1.0) if self.squares > 0 else 0.0

    @property
    def max(self) -> float:
        """Largest value."""
        return self.highest if self.count else 0.0

    @property
    def min(self) -> float:
        """Smallest value."""
        return -self.negated_lowest if self.count else 0.0


def divided(sums: HostSums, name: str, factor: float) -> HostSums:
    """The sums `name.*` of x / factor instead of x, factor > 0."""
    scales = (1.0, factor, factor**2, factor, factor)
    return {
        f"{name}{part}": sums[f"{name}{part}"] / scale for part, scale in zip(_MOMENTS, scales, strict=True)
    }
