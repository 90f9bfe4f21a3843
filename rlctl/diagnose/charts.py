"""Reduces series to a size that can be drawn, as a line of text or as points of a plot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose.table import Series

_BLOCKS = "▁▂▃▄▅▆▇█"
#: Maximum number of points of one curve on a page.
MAX_POINTS = 2000


def thinned(series: Series, max_points: int = MAX_POINTS) -> Series:
    """Reduces a series to at most `max_points` points: the lowest and the highest of each bucket.

    Spikes are therefore kept. So are the first and the last point.
    """
    if len(series) <= max_points:
        return series
    starts = _bucket_starts(len(series), max(1, max_points // 2 - 1))
    kept = {0, len(series) - 1}
    for start, part in zip(starts.tolist(), np.split(series.values, starts[1:]), strict=True):
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    places = np.array(sorted(kept))
    return Series(series.steps[places], series.values[places])


def sparkline(series: Series, width: int) -> tuple[str, NDArray[np.int64]]:
    """The series as a line of at most `width` blocks, and the first step of each; empty for an empty series.

    Each block shows the value of its bucket that is furthest from the series' median.
    """
    if len(series) == 0:
        return "", series.steps
    starts = _bucket_starts(len(series), width)
    distance = series.values - np.median(series.values)
    low = np.minimum.reduceat(distance, starts)
    high = np.maximum.reduceat(distance, starts)
    shown = np.where(-low > high, low, high)
    spread = float(np.ptp(shown))
    levels = np.zeros(len(shown)) if spread == 0.0 else (shown - shown.min()) / spread
    text = "".join(_BLOCKS[round(level * (len(_BLOCKS) - 1))] for level in levels.tolist())
    return text, series.steps[starts]


def _bucket_starts(length: int, buckets: int) -> NDArray[np.int64]:
    """Start indices of at most `buckets` parts of nearly equal size."""
    return np.unique(np.linspace(0, length, min(buckets, length), endpoint=False).astype(np.int64))
