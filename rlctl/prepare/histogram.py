"""How long prompts are, without keeping every length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

Unit = Literal["tokens", "characters"]
_QUANTILES = (0.5, 0.9, 0.99)


class Histogram:
    """Counts of lengths; memory grows with how different they are, not with how many."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._counts: Counter[int] = Counter()

    def add(self, lengths: Iterable[int]) -> None:
        """Some more."""
        self._counts.update(lengths)

    @property
    def total(self) -> int:
        """How many there are."""
        return self._counts.total()

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of them do not exceed.

        Args:
            share: in [0, 1]; 0 is the shortest.
        """
        seen, wanted = 0, share * self.total
        for length, count in sorted(self._counts.items()):
            seen += count
            if seen >= wanted:
                return length
        return 0

    def summary(self) -> dict[str, int]:
        """The shortest, some quantiles and the longest."""
        inner = {f"p{share * 100:g}": self.quantile(share) for share in _QUANTILES}
        return {"min": self.quantile(0), **inner, "max": self.quantile(1)}

    def bins(self, number: int) -> list[tuple[int, int, int]]:
        """(from, to, count) of at most so many ranges of equal width, both ends included."""
        if not self.total:
            return []
        low, high = self.quantile(0), self.quantile(1)
        width = -(-(high - low + 1) // number)
        counts = Counter[int]()
        for length, count in self._counts.items():
            counts[(length - low) // width] += count
        return [
            (low + place * width, min(high, low + (place + 1) * width - 1), counts[place])
            for place in range(-(-(high - low + 1) // width))
        ]

    def to_json(self) -> dict[str, Any]:
        """In JSON's types."""
        bins = [{"from": low, "to": high, "rows": count} for low, high, count in self.bins(20)]
        return {"unit": self.unit, **self.summary(), "histogram": bins}
