"""The order of prompts: a permutation per epoch, or a mixture of sources by weight.

Every function of a position depends on nothing but its arguments, so that a resumed run needs no saved state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.errors import UsageError

#: Number that keeps the seeds of an epoch's order apart from those of the sources.
_ORDER = 1 << 20


@dataclass(frozen=True, slots=True)
class MixedSource:
    """Consecutive rows that share a weight."""

    name: str  # as the spec names it
    size: int  # number of its rows
    weight: float  # of its rows in an epoch, relative to the other sources

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class PromptMixture:
    """Sources whose rows follow each other in the data set.

    An epoch has as many prompts as there are rows. Each source has its share of them, rounded by largest
    remainders, and goes on in the next epoch where it ended: its rows are all used before one is repeated.

    Raises:
        UsageError: a source has no rows, or its share of an epoch is less than one prompt.
    """

    sources: tuple[MixedSource, ...]

    def __post_init__(self) -> None:
        for source, count in zip(self.sources, self.counts, strict=True):
            where = f"data.train_files: {source.name}"
            if not source.size:
                raise UsageError(
                    "no prompt of this part of the mixture remains", where=where, fix="leave it out"
                )
            if not count:
                message = f"its weight {source.weight:g} gives it none of the {self.size} prompts of an epoch"
                raise UsageError(message, where=where, fix="raise its weight, or leave it out")

    @property
    def size(self) -> int:
        """Prompts in an epoch."""
        return sum(source.size for source in self.sources)

    @property
    def counts(self) -> tuple[int, ...]:
        """Prompts of each source in an epoch."""
        return shares(tuple(source.weight for source in self.sources), self.size)

    def row_at(self, position: int, *, seed: int, shuffle: bool) -> int:
        """Index of the row at a position in the concatenated epochs."""
        epoch, place = divmod(position, self.size)
        of_source, number = _order(self.counts, seed if shuffle else None, epoch)
        chosen = int(of_source[place])
        source = self.sources[chosen]
        drawn = epoch * self.counts[chosen] + int(number[place])
        cycle, place_in_source = divmod(drawn, source.size)
        first = sum(before.size for before in self.sources[:chosen])
        if not shuffle:
            return first + place_in_source
        return first + int(permutation(source.size, (seed, cycle, chosen + 1))[place_in_source])

    def source_of(self, row: int) -> int:
        """Number of the source of a row."""
        ends = np.cumsum([source.size for source in self.sources])
        return int(np.searchsorted(ends, row, side="right"))


@lru_cache(maxsize=8)
def shares(weights: tuple[float, ...], size: int) -> tuple[int, ...]:
    """Divides `size` in proportion to weights, by largest remainders; the sum is `size`."""
    exact = np.array(weights) / sum(weights) * size
    counts = np.floor(exact).astype(int)
    for place in np.argsort(counts - exact, kind="stable")[: size - int(counts.sum())]:
        counts[place] += 1
    return tuple(map(int, counts))


@lru_cache(maxsize=2)
def _order(counts: tuple[int, ...], seed: int | None, epoch: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """For each place of an epoch the source, and how often the source came before; None: evenly spread."""
    sources = np.repeat(np.arange(len(counts)), counts)
    if seed is None:
        spread = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        order = sources[np.argsort(spread, kind="stable")]
    else:
        order = sources[permutation(len(sources), (seed, epoch, _ORDER))]
    number = np.empty(len(order), np.int64)
    for source, count in enumerate(counts):
        number[order == source] = np.arange(count)
    return order, number


@lru_cache(maxsize=8)
def permutation(size: int, seeds: tuple[int, ...]) -> NDArray[np.int64]:
    """A permutation of `range(size)`, determined by the seeds."""
    # RandomState, not Generator: NumPy guarantees that its streams never change between versions.
    state = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(list(seeds))))
    return state.permutation(size)
