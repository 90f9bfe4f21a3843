"""Levels and spikes in a noisy series, by medians."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rlctl.diagnose.finding import Evidence, Severity
from rlctl.diagnose.table import Series
from rlctl.diagnose.thresholds import (
    MIN_STEPS,
    SPIKE_HISTORY,
    SPIKE_MEDIANS,
    SPIKE_MIN_HISTORY,
    SPIKE_SIGMAS,
    WINDOW,
    Levels,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK = 1 << 16  # windows at once, so that memory stays bounded on long logs


@dataclass(frozen=True, slots=True)
class Crossing:
    """A level and how it was crossed.

    Attributes:
        severity: of the worst level crossed.
        worst: the window median furthest beyond it.
        limit: the level.
        first_step, last_step: from the first to the last window beyond it.
        lasts: whether the newest window is still beyond.
        key: the metric.
    """

    key: str
    severity: Severity
    worst: float
    limit: float
    first_step: int
    last_step: int
    lasts: bool

    @property
    def where(self) -> str:
        """`in steps 3–40`, and whether that is over."""
        return f"in steps {self.first_step}–{self.last_step}" + ("" if self.lasts else " (not since)")

    @property
    def evidence(self) -> Evidence:
        """The crossing as a figure."""
        relation = "over" if self.worst > self.limit else "under"
        figure = f"{self.worst:.3g} (median of {WINDOW} steps), {relation} {self.limit:g}"
        return Evidence(self.key, figure, self.first_step, self.last_step)


def crossing(series: Series, levels: Levels) -> Crossing | None:
    """The worst level that the series crossed for the length of a window, if any."""
    if len(series) < MIN_STEPS:
        return None
    values = np.abs(series.values) if levels.absolute else series.values
    medians = rolling_median(values, min(WINDOW, len(values)))
    worst = float(medians.min() if levels.is_floor else medians.max())
    for severity, limit in reversed(levels.tiers):
        beyond = medians < limit if levels.is_floor else medians > limit
        if beyond.any():
            places = np.flatnonzero(beyond)
            last = places[-1] + len(values) - len(medians)
            first_step, last_step = int(series.steps[places[0]]), int(series.steps[last])
            return Crossing(levels.key, severity, worst, limit, first_step, last_step, bool(beyond[-1]))
    return None


def rolling_median(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """(M,) → (M − width + 1,): the median of every `width` consecutive values."""
    windows = sliding_window_view(values, width)
    parts = [np.median(windows[at : at + _CHUNK], axis=1) for at in range(0, len(windows), _CHUNK)]
    return np.concatenate(parts)


def spikes(series: Series) -> Series:
    """The values far above the steps before them, by robust deviations and by size.

    Compared with the `SPIKE_HISTORY` values before, so that a slow drift is none.
    """
    from scipy.stats import median_abs_deviation

    values = series.values
    width = min(SPIKE_HISTORY, max(SPIKE_MIN_HISTORY, len(values) // 2))
    if len(values) <= width:
        return Series(series.steps[:0], values[:0])
    history = sliding_window_view(values[:-1], width)
    candidates = values[width:]
    found = np.zeros(len(values), dtype=bool)
    for at in range(0, len(history), _CHUNK):
        before = history[at : at + _CHUNK]
        median = np.median(before, axis=1)
        sigma = median_abs_deviation(before, axis=1, scale="normal")
        limit = np.maximum(median + SPIKE_SIGMAS * sigma, SPIKE_MEDIANS * median)
        found[width + at : width + at + len(before)] = candidates[at : at + _CHUNK] > limit
    return Series(series.steps[found], values[found])


def longest_true(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """(start, length) of the longest run of True; length 0 if there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    if len(starts) == 0:
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])
