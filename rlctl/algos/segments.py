"""Sums over segments of a column, such as the tokens of each turn or episode, and sums for metrics.

Sums are in float64 and do not depend on how a batch is divided: each segment is reduced on its own. Padding
exists here and in `rlctl.engine.layout` only.

For a metric, reduce first and divide once. A dict of named () float64 sums describes one part of a batch, on
the device. Parts are added; `Ranks.all_reduce` merges all ranks and gives floats. Metrics are computed from
the total, never as an average of the parts' metrics. A name that ends with `.max` merges by maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlctl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Sums = dict[str, "Tensor"]
HostSums = dict[str, float]
LARGEST = ".max"
#: Sums of values x: their number, Σx, Σx², the largest and the smallest (as the largest of −x).
_MOMENTS = (".n", ".x", ".xx", f".high{LARGEST}", f".low{LARGEST}")


class Segments:
    """K consecutive segments of a column of M entries; a segment may be empty.

    Args:
        lengths: (K,) int64, entries of each segment.
        order: (M,) int64, indices of the entries, segment by segment, in the order of `places`, `padded` and
            `cumsum`; None: that of the column.

    Raises:
        ValueError: lengths are not int64 or negative.
    """

    order: Tensor | None = None

    def __init__(self, lengths: Tensor, order: Tensor | None = None) -> None:
        if lengths.ndim != 1 or lengths.dtype != torch.int64 or bool((lengths < 0).any()):
            raise ValueError("lengths of segments must be (K,) int64, none negative")
        self.lengths = lengths
        self.order = order

    @classmethod
    def of_index(cls, index: Tensor, count: int) -> Segments:
        """From the segment (M,) of each entry, ascending, and the number of segments."""
        return cls(torch.bincount(index, minlength=count))

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def total(self) -> int:
        """Number of entries, M."""
        return int(self.lengths.sum())

    @cached_property
    def starts(self) -> Tensor:
        """(K,) int64: index of the first entry of each segment."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def index(self) -> Tensor:
        """(M,) int64: the segment of each entry."""
        places = torch.arange(len(self.lengths), device=self.lengths.device)
        return places.repeat_interleave(self.lengths, output_size=self.total)

    @cached_property
    def places(self) -> Tensor:
        """(M,) int64: position of each entry within its segment, from 0."""
        values = torch.arange(self.total, device=self.lengths.device) - self.spread(self.starts)
        return values if self.order is None else torch.empty_like(values).scatter_(0, self.order, values)

    def _reduced(self, values: Tensor, how: str) -> Tensor:
        if len(values) != self.total:
            raise ValueError(f"a column of {len(values)} entries does not fit segments of {self.total}")
        # `unsafe`: the lengths were checked, against this column too
        return torch.segment_reduce(values.double(), how, lengths=self.lengths, axis=0, unsafe=True)

    def sum(self, values: Tensor) -> Tensor:
        """(K,) float64: sum of each segment of `values` (M,); 0.0 for an empty one."""
        return self._reduced(values, "sum")

    def mean(self, values: Tensor) -> Tensor:
        """(K,) float64: mean of each segment; 0.0 for an empty one."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """(K,) float64: largest value of each segment; −∞ for an empty one."""
        return self._reduced(values, "max")

    def any(self, flags: Tensor) -> Tensor:
        """(K,) bool: whether a flag (M,) is True within the segment."""
        return self.sum(flags) > 0

    def spread(self, values: Tensor) -> Tensor:
        """(M,): each segment's value (K,) at all of its entries."""
        return values.repeat_interleave(self.lengths, output_size=self.total)

    def padded(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """(K, T): one row per segment, filled on the right; T is the longest segment."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        rows = values.new_full((len(self.lengths), longest), fill)
        rows[self.index, self.places] = values
        return rows

    def flat(self, rows: Tensor) -> Tensor:
        """(M,): the column whose `padded` form is `rows` (K, T)."""
        return rows[self.index, self.places]

    def cumsum(self, values: Tensor) -> Tensor:
        """(M,) float64: running sum within each segment, this entry included."""
        return self.flat(self.padded(values.double()).cumsum(1))

    def entries_of(self, chosen: Tensor) -> Tensor:
        """(m,) int64: indices of all entries of the chosen segments (k,) int64, in that order."""
        lengths = self.lengths[chosen]
        values = Segments(lengths)
        return values.spread(self.starts[chosen]) + values.places

    def kept(self, mask: Tensor) -> Segments:
        """The segments of the column `values[mask]`, mask (M,) bool."""
        order = self.order
        if order is not None:
            order = (mask.cumsum(0) - 1)[order[mask[order]]]
        return Segments(self.sum(mask).long(), order)


class Singles(Segments):
    """Every entry of a column is a segment of its own."""

    def __init__(self, like: Segments) -> None:
        self.lengths = like.lengths.new_ones(1).expand(like.total)  # takes no memory

    def sum(self, values: Tensor) -> Tensor:
        """(M,) float64: the values themselves."""
        return values.double()

    def mean(self, values: Tensor) -> Tensor:
        """(M,) float64: the values themselves."""
        return values.double()

    def max(self, values: Tensor) -> Tensor:
        """(M,) float64: the values themselves."""
        return values.double()

    def any(self, flags: Tensor) -> Tensor:
        """(M,) bool: the flags themselves."""
        return flags

    def spread(self, values: Tensor) -> Tensor:
        """(M,): the values themselves."""
        return values


@dataclass(frozen=True)
class Units:
    """The nested segments of the M sampled tokens of a batch: turns in sequences in episodes.

    Where a formula speaks of a response or sequence, `algorithm.unit` chooses `sequence` or `episode`. With
    one turn and one sequence per episode all three are equal.
    """

    turn: Segments
    sequence: Segments
    episode: Segments

    @classmethod
    def of_responses(cls, lengths: Tensor) -> Units:
        """One turn and one sequence per episode, of these numbers (B,) int64 of sampled tokens."""
        same = Segments(lengths)
        return cls(same, same, same)

    @classmethod
    def nested(cls, sequence: Segments, episode: Segments, turns: Tensor) -> Units:
        """From the number of the turn (M,) of each token within its episode.

        A turn whose tokens are in several sequences is one turn in each of them. Episodes have the order of
        sampling, which is not that of the columns where an episode's turns alternate between sequences.

        Example: an episode whose turns 0 and 2 are in its first sequence, turn 1 in its second:

            column   0 1 2 3 4
            turns    0 0 2 1 1
            order    0 1 3 4 2    `order[k]`: column of the k-th sampled token; read by `cumsum` and `places`
        """
        inside = sequence.index
        of = episode.index
        starts = torch.ones_like(inside, dtype=torch.bool)
        starts[1:] = (inside[1:] != inside[:-1]) | (turns[1:] != turns[:-1])
        turn = Segments(torch.bincount(starts.cumsum(0) - 1))
        if ((of[1:] == of[:-1]) & (turns[1:] < turns[:-1])).any():
            episode = Segments(episode.lengths, sorted_by(of, then=turns))
        return cls(turn, sequence, episode)

    @cached_property
    def token(self) -> Segments:
        """Every token by itself."""
        return Singles(self.sequence)

    def of(self, level: str) -> Segments:
        """The segments of `token`, `turn`, `sequence` or `episode`."""
        segments: Segments = getattr(self, level)
        return segments

    def present(self) -> Units:
        """The segments that are not empty."""
        every = (self.turn, self.sequence, self.episode)
        return Units(*(Segments(each.lengths[each.lengths > 0], each.order) for each in every))

    def kept(self, mask: Tensor) -> Units:
        """The units of the tokens where `mask` (M,) is True."""
        return Units(self.turn.kept(mask), self.sequence.kept(mask), self.episode.kept(mask))


# --- sums for metrics --------------------------------------------------------------------------------


def sorted_by(values: Tensor, *, then: Tensor) -> Tensor:
    """(n,) int64: the places by ascending `values`, those of equal ones by `then`; a stable order."""
    by_second = then.argsort(stable=True)
    return by_second[values[by_second].argsort(stable=True)]


def added(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of all parts, which have the same names; tensors or floats."""

    def merged(name: str) -> Any:
        values = [sums[name] for sums in parts]
        if not name.endswith(LARGEST):
            return sum(values[1:], values[0])
        return torch.stack(values).amax() if torch.is_tensor(values[0]) else max(values)

    return {name: merged(name) for name in parts[0]}


def to_host(sums: Sums) -> HostSums:
    """The sums as floats, in one transfer."""
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def ratio(total: float, count: float) -> float:
    """A sum divided by a count; 0.0 if the count is 0."""
    return total / count if count else 0.0


def counts(numbers: Mapping[str, float]) -> Sums:
    """Sums of numbers that are known on the host."""
    return {name: torch.tensor(float(number), dtype=torch.float64) for name, number in numbers.items()}


def moments(name: str, values: Tensor, n: Tensor | None = None) -> Sums:
    """Sums `name.*` of values (K,), from which `Moments` is read.

    Args:
        n: (K,) multiplicity of each value; None: 1.
    """
    x = values.double()
    if not len(x):
        figures = tuple(x.new_tensor((0.0, 0.0, 0.0, -math.inf, -math.inf)))
    elif n is None:
        low, high = x.aminmax()
        figures = x.new_tensor(len(x)), x.sum(), x @ x, high, -low
    else:
        low = x.where(n > 0, math.inf).amin()
        high = x.where(n > 0, -math.inf).amax()
        figures = n.sum().double(), x @ n.double(), x * n @ x, high, -low
    return {f"{name}{suffix}": value for suffix, value in zip(_MOMENTS, figures, strict=True)}


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
        return cls(*(sums[f"{name}{suffix}"] for suffix in _MOMENTS))

    def with_zeros(self, count: float) -> Moments:
        """With this number of further values that are 0."""
        if not count:
            return self
        edges = max(self.highest, 0.0), max(self.negated_lowest, 0.0)
        return Moments(self.count + count, self.total, self.squares, *edges)

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
        f"{name}{suffix}": sums[f"{name}{suffix}"] / scale
        for suffix, scale in zip(_MOMENTS, scales, strict=True)
    }
