"""Detects crossed levels, changes since the run's start, trends and spikes in noisy series, with medians.

Each function takes about 0.1 s per million values; costlier statistics use only a few window medians.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Severity
from rlctl.diagnose.table import Series, Table
from rlctl.diagnose.thresholds import Levels

#: Median absolute deviation of the standard normal distribution: its third quartile.
_NORMAL_MAD = 0.6744897501960817
#: Up to this length the probability of a rank correlation is that of all permutations, else of a normal one.
_EXACT_RANKS = 33
#: scipy's name of what is beyond the ends of a series → NumPy's.
_PADDING = {"reflect": "symmetric", "mirror": "reflect", "nearest": "edge"}
_CHUNK = 1 << 12  # windows processed at once, to bound the memory for long logs


@dataclass(frozen=True, slots=True)
class Start:
    """Level and noise of a metric in the run's first steps."""

    median: float
    #: robust standard deviation (from the median absolute deviation), at least a small share of the median
    sigma: float
    is_stable: bool  # the first steps have no trend, so they can serve as a reference

    def is_far(self, value: float) -> bool:
        """Whether a value is further from the median than noise explains."""
        return abs(value - self.median) > th.FAR_SIGMAS * self.sigma


@dataclass(frozen=True, slots=True)
class Crossing:
    """A level that a metric crossed, and the steps at which it did."""

    key: str  # the metric
    severity: Severity  # of the worst level crossed; `info` where there is a `remark`
    worst: float  # the window median furthest beyond the level
    limit: float  # the level
    window: tuple[int, int]  # first and last step of the values whose median `worst` is
    #: first_step, last_step: the steps beyond the level
    first_step: int
    last_step: int
    since: int  # the first step beyond the level of the first window that is beyond it
    lasts: bool  # whether the newest window is beyond it
    remark: str = ""  # why it is only a remark: unchanged since the run's start, or only at the start

    @property
    def where(self) -> str:
        """`in steps 3–40`, and whether the crossing has ended."""
        after = self.remark or ("" if self.lasts else "not since")
        return f"in {steps_text(self.first_step, self.last_step)}{after and f' ({after})'}"

    @property
    def evidence(self) -> Evidence:
        """The crossing as evidence of a finding."""
        relation = "exactly"
        if self.worst > self.limit:
            relation = "over"
        elif self.worst < self.limit:
            relation = "under"
        first, last = self.window
        of = f" (median of {steps_text(first, last)})" if first < last else ""
        figure = f"{self.worst:.3g}{of}, {relation} {self.limit:g}"
        return Evidence(self.key, figure, self.first_step, self.last_step, lasts=self.lasts)


def steps_text(first: int, last: int) -> str:
    """`step 3`, or `steps 3–40`."""
    return f"step {first:,}" if first == last else f"steps {first:,}–{last:,}"


def start_of(series: Series) -> Start | None:
    """Level and noise at the run's start; None where too few steps were logged."""
    count = min(th.START_STEPS, len(series) // 2)
    if count < th.START_MIN_STEPS:
        return None
    first = series.values[:count]
    median = float(np.median(first))
    sigma = float(deviation(first))
    early = np.median(first[: count // 2])
    late = np.median(first[count // 2 :])
    is_small = bool(abs(late - early) <= th.START_TREND_SIZE * abs(median))
    is_stable = is_small or kendall(first).p_value >= th.START_TREND_P
    return Start(median, max(sigma, th.SIGMA_FLOOR * abs(median)), is_stable)


class RankCorrelation(NamedTuple):
    """Kendall's τ-b, and the probability of one as far from 0 in a series without trend."""

    tau: float
    p_value: float


def kendall(values: NDArray[np.float64]) -> RankCorrelation:
    """Rank correlation of (M,) values with their places; (0, 1) if all are equal.

    Equal to `scipy.stats.kendalltau`, whose import takes 40 MiB of a training process.
    """
    count = len(values)
    pairs = count * (count - 1) // 2
    later = np.triu_indices(count, 1)
    before, after = values[later[0]], values[later[1]]
    rising, falling = int((after > before).sum()), int((after < before).sum())
    tied = pairs - rising - falling
    if tied == pairs:
        return RankCorrelation(0.0, 1.0)
    tau = (rising - falling) / math.sqrt(pairs) / math.sqrt(pairs - tied)
    fewer = min(rising, falling)
    if not tied and (count <= _EXACT_RANKS or fewer <= 1):
        return RankCorrelation(tau, min(1.0, 2.0 * _share_of_permutations(count, fewer)))
    ties = np.unique(values, return_counts=True)[1]
    variance = (2 * pairs * (2 * count + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18
    return RankCorrelation(tau, math.erfc(abs(rising - falling) / math.sqrt(2.0 * variance)))


def _share_of_permutations(count: int, most: int) -> float:
    """Share of the permutations of `count` values with at most so many pairs in the wrong order."""
    shares = np.array([1.0])  # of each number of pairs in the wrong order
    for size in range(2, count + 1):
        shares = np.convolve(shares, np.full(size, 1.0 / size))[: most + 1]
    return float(shares.sum())


def theil_sen(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(M,) → (M,): a robust line through the values, whose slope is the median of those of all pairs."""
    places = np.arange(len(values))
    first, second = np.triu_indices(len(values), 1)
    slope = np.median((values[second] - values[first]) / (second - first))
    return np.asarray(np.median(values) + slope * (places - np.median(places)))


def rolling_median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(M,) → (M − W + 1,): the median of every `WINDOW` consecutive values, or of all if there are fewer."""
    if len(values) < th.WINDOW:
        return np.array([np.median(values)])
    half = th.WINDOW // 2
    return smoothed(values, mode="nearest")[half : len(values) - half]


def smoothed(values: NDArray[Any], size: int = th.WINDOW, mode: str = "reflect") -> NDArray[Any]:
    """(M,) → (M,): the median of the `size` values around each; `mode` is scipy's, for the ends.

    The import of scipy's filter takes 29 MiB, so that only long logs, where it is faster, use it.
    """
    if not len(values):
        return values
    if len(values) > _CHUNK:
        from scipy.ndimage import median_filter

        return np.asarray(median_filter(values, size=size, mode=mode))
    padded = np.pad(values, (size // 2, (size - 1) // 2), _PADDING[mode])  # type: ignore[call-overload]
    return np.asarray(np.partition(sliding_window_view(padded, size), size // 2)[:, size // 2])


def deviation(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Robust standard deviation along the last axis, from the median absolute deviation; NaN of no values.

    Equal to `scipy.stats.median_abs_deviation`, whose import takes longer than many steps of a small run.
    """
    if not values.shape[-1]:
        return np.full(values.shape[:-1], np.nan)
    distances = np.abs(values - np.median(values, axis=-1, keepdims=True))
    return np.asarray(np.median(distances, axis=-1) / _NORMAL_MAD)


def crossing(series: Series, levels: Levels) -> Crossing | None:
    """The most severe level that a window median crossed, if any.

    With fewer than `MIN_STEPS` values, only critical levels count. With fewer values than a window, the
    median of all values is compared.
    """
    tiers = [tier for tier in levels.tiers if len(series) >= th.MIN_STEPS or tier[0] == "critical"]
    if not len(series) or not tiers:
        return None
    if levels.absolute:
        series = Series(series.steps, np.abs(series.values))
    is_beyond: Callable[..., Any] = np.greater
    if levels.is_floor:
        is_beyond = np.less
    elif levels.is_share:
        is_beyond = np.greater_equal
    values = series.values
    half = th.WINDOW // 2
    if not is_beyond(values, tiers[0][1]).any():
        return None
    medians = rolling_median(values)
    at = int(medians.argmin() if levels.is_floor else medians.argmax())
    worst = float(medians[at])
    reached = [tier for tier in tiers if is_beyond(worst, tier[1])]
    if not reached:
        return None
    severity, limit = reached[-1]
    beyond = np.flatnonzero(is_beyond(medians, limit))
    lasts = bool(beyond[-1] == len(medians) - 1)
    # From the middle of the first window beyond the level to the middle of the last; if that is the first
    # (last) window of the series, from the first (to the last) value.
    since = int(beyond[0]) + int(np.argmax(is_beyond(values[beyond[0] :], limit)))
    first = 0 if beyond[0] == 0 else int(beyond[0]) + half
    last = len(values) - 1 if lasts else int(beyond[-1]) + half
    remark = ""
    if severity != "critical":
        is_over = not lasts and last < th.START_STEPS - half
        remark = _remark_on(series, worst, is_over=is_over, relative=levels.relative)
    steps = series.steps
    return Crossing(
        key=levels.key,
        severity="info" if remark else severity,
        worst=worst,
        limit=limit,
        window=(int(steps[at]), int(steps[min(at + th.WINDOW, len(values)) - 1])),
        first_step=int(steps[first]),
        last_step=int(steps[last]),
        since=int(steps[since]),
        lasts=lasts,
        remark=remark,
    )


def _remark_on(series: Series, worst: float, *, is_over: bool, relative: bool) -> str:
    """Why a crossing is only a remark; empty: it is more.

    Args:
        is_over: it ended within the start of the run.
        relative: it counts only far from the start.
    """
    if is_over:
        return "not since: at the run's start only"
    if relative:
        start = start_of(series)
        if start is not None and start.is_stable and not start.is_far(worst):
            return "as from the run's start"
    return ""


def trend(series: Series) -> float:
    """Kendall's τ of a significant rise (positive) or fall over the whole series; 0 without one."""
    count = min(th.TREND_POINTS, len(series) // th.TREND_WINDOW)
    if count < th.MIN_STEPS:
        return 0.0
    medians = np.array([np.median(part) for part in np.array_split(series.values, count)])
    tau, p_value = kendall(medians)
    return tau if abs(tau) >= th.TREND_TAU and p_value <= th.TREND_P else 0.0


def rises(table: Table, key: str) -> bool:
    """Whether the metric rises; for the spread within groups, whether it falls, as more groups are equal."""
    found = trend(table.series(key))
    return found < 0.0 if key == th.GROUP_STD else found > 0.0


class Change(NamedTuple):
    """A series whose newest values are all nearer to their median than to its start."""

    start: float  # median of the first three values, or of the first window if that is further from the end
    end: float  # median of the newest values
    since: int  # the first step that is beyond a tenth of the change


def lasting_change(series: Series) -> Change | None:
    """The change from the start of a series to its end, if every one of the newest values shows it."""
    values = series.values
    width = min(th.WINDOW, len(values) // 2)
    if not width:
        return None
    end = float(np.median(values[-width:]))
    starts = (float(np.median(values[:count])) for count in (min(3, width), width))
    start = max(starts, key=lambda value: abs(value - end))
    done = (values - start) / ((end - start) or np.inf)
    if done[-width:].min() <= 0.5:
        return None
    return Change(start, end, int(series.steps[np.argmax(done > 0.1)]))


def growth(series: Series) -> Change | None:
    """A lasting rise of positive values, or a significant steady one; of both the one by the larger factor.

    The ends of a steady rise are those of a robust line (Theil and Sen) through the logarithms.
    """
    step = max(1, len(series) // th.TREND_POINTS)
    values = series.values[::step]
    steps = series.steps[::step]
    jump = lasting_change(series)
    if jump is not None and jump.end <= jump.start:
        jump = None
    if len(values) < th.START_MIN_STEPS or values.min() <= 0.0:
        return jump
    logs = np.log(values)
    tau, p_value = kendall(logs)
    if tau < th.TREND_TAU or p_value > th.TREND_P:
        return jump
    line = np.exp(theil_sen(logs))
    steady = Change(float(line[0]), float(line[-1]), int(steps[np.argmax(line > 2.0 * line[0])]))
    is_larger = jump is None or (jump.start > 0.0 and jump.end / jump.start < steady.end / steady.start)
    return steady if is_larger else jump


def change_evidence(key: str, start: float, end: float, steps: NDArray[np.int64]) -> Evidence:
    """Evidence that a metric went from one value to another within these (M,) steps."""
    return evidence_over(steps, key, f"from {start:.3g} to {end:.3g}")


def evidence_over(steps: NDArray[np.int64], key: str, figure: str) -> Evidence:
    """Evidence over these (M,) steps, M > 0."""
    return Evidence(key, figure, int(steps[0]), int(steps[-1]))


@dataclass(frozen=True, slots=True)
class Spikes(Series):
    """Values far above the preceding ones; `before` (M,): the median that each is compared with."""

    before: NDArray[np.float64]


def spikes(series: Series) -> Spikes:
    """Finds values far above the preceding `SPIKE_HISTORY` values; a slow drift is not a spike."""
    values = series.values
    width = min(th.SPIKE_HISTORY, max(th.SPIKE_MIN_HISTORY, len(values) // 2 | 1))
    if len(values) <= width:
        return Spikes(series.steps[:0], values[:0], values[:0])
    half = width // 2
    before = smoothed(values, width, "nearest")[half : len(values) - half - 1]
    places = width + np.flatnonzero((before > 0.0) & (values[width:] > th.SPIKE_MEDIANS * before))
    history = sliding_window_view(values, width)
    parts = [places[at : at + _CHUNK] for at in range(0, len(places), _CHUNK)]
    sigma = [deviation(history[part - width]) for part in parts]
    limit = before[places - width] + th.SPIKE_SIGMAS * np.concatenate([np.empty(0), *sigma])
    indices = places[values[places] > limit]
    return Spikes(series.steps[indices], values[indices], before[indices - width])


def is_frequent(flags: NDArray[np.bool_]) -> bool:
    """Whether something exact holds on so many of the steps that rules report it."""
    return len(flags) > 0 and bool(flags.mean() >= (th.ZERO_SHARE if len(flags) >= th.MIN_STEPS else 1.0))


def longest_true(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """(start, length) of the longest run of True; length 0 if there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    starts = edges[::2]
    ends = edges[1::2]
    if len(starts) == 0:
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])
