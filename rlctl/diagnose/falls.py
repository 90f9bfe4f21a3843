"""Falls of a noisy series from its best level, and levels that are new."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose import thresholds as th
from rlctl.diagnose.signals import deviation, smoothed
from rlctl.diagnose.table import Series

#: Number of standard errors that a fall exceeds; first quartile of |x|, x standard normal.
FALL_SIGMAS, NORMAL_QUARTILE = 5.0, 0.3186


def fall_of(series: Series) -> tuple[float, float, int] | None:
    """Best and newest level, and the last step at the best, where the series fell by more than its noise.

    The first value counts as a level of its own, because a policy can collapse within a few steps.
    """
    values = series.values
    width = min(th.WINDOW, max(1, len(values) // 5 | 1))
    half = width // 2
    medians = smoothed(values, width)[half : len(values) - half]
    last = float(medians[-1])
    noise = float(deviation(np.diff(values))) / 2**0.5
    drift = float(deviation(np.diff(medians[::width]))) if len(values) >= 5 * width else 0.0
    error = max(noise * (np.pi / 2 / width) ** 0.5, drift)
    falls = []
    # Few steps tell their own noise badly, and the best of their levels is high by chance.
    is_beyond_noise = medians.max() - last > FALL_SIGMAS * (1.0 + 8.0 / len(values)) * error
    if is_beyond_noise or falls_at_a_step(values, width):
        falls.append(np.append(np.full(half, -np.inf), medians))
    later = values[1:][-len(values) // 2 :]
    fall = values[0] - last
    if fall > th.SPIKE_SIGMAS * max(noise, float(later.std())):
        falls.append(values[: int(np.argmax(values < values[0] - fall / 10.0))])
    if not falls:
        return None
    levels = max(falls, key=lambda level: float(level.max()))
    best = float(levels.max())
    at = int(np.flatnonzero(levels >= best - (best - last) / 10.0)[-1])
    return best, last, int(series.steps[at])


def falls_at_a_step(values: NDArray[np.float64], width: int) -> bool:
    """Whether all values from some step on are below all before it, `width` or more each, by a margin.

    Noise is that of single levels: of values that alternate between levels, most
    differences are larger.
    """
    if len(values) < 2 * width:
        return False
    quartile = float(np.quantile(np.abs(np.diff(values)), 0.25))
    noise = quartile / (NORMAL_QUARTILE * 2**0.5)
    lowest = np.minimum.accumulate(values)
    highest = np.maximum.accumulate(values[::-1])[::-1]
    margins = lowest[width - 1 : len(values) - width] - highest[width : len(values) - width + 1]
    return bool(margins.max() > FALL_SIGMAS * noise)


def is_new_level(values: NDArray[np.float64], old: float, new: float) -> bool:
    """Whether the newest values stay at the level `new` for longer than earlier stays there explain.

    Batches from two sources have two levels, and are at either one now and then. Of m + 1 independent
    stays of exponential lengths, the newest is k times as long as the longest other one with probability
    1 / C(m + k, m). Of a log that begins at the new level and jumps from it, one stay tells little.
    """
    # 0 at the old level, 1 at the new one
    moved = (smoothed(values, th.LEVEL_WINDOW) - old) / (new - old)
    is_new = moved >= 1.0 - th.LEVEL_EDGE
    at_level = np.flatnonzero(is_new | (moved <= th.LEVEL_EDGE))
    if not len(at_level) or not is_new[at_level[-1]]:
        return False
    # A stay lasts until the first value at the other level.
    begins = at_level[np.flatnonzero(np.diff(is_new[at_level], prepend=~is_new[at_level[:1]]))]
    lengths = np.diff(begins, append=len(moved))
    newest = lengths[-1]
    earlier = lengths[:-1][is_new[begins[:-1]]]
    if not len(earlier):
        return True
    limit = th.LEVEL_P
    if len(earlier) == 1 and is_new[begins[0]]:
        between = lengths[0] - is_new[: begins[1]].sum()
        if between > th.LEVEL_JUMP:  # it was learned
            return True
        limit = th.LEVEL_P_FIRST
    return _probability_of_longer(len(earlier), float(newest / earlier.max())) <= limit


def _probability_of_longer(count: int, ratio: float) -> float:
    """1 / C(count + ratio, count)."""
    return math.exp(math.lgamma(count + 1) + math.lgamma(ratio + 1) - math.lgamma(count + ratio + 1))
