"""Forecasts when a metric reaches its critical level if its trend continues.

A trend is a Theil–Sen line through the newest values, on the scale on which it is straightest: the values
themselves, their logarithm, or, between two bounds, their logit. The line is fitted to the longest recent
stretch of which both halves have its slope and the newest values lie on it.

The interval is where the line's confidence band meets the level (Fieller's method). The band includes the
noise of the values, inflated for autocorrelation, and a change of the slope (`SLOPE_WANDER`). There is no
forecast where the interval is unbounded, and none further ahead than the length of the fitted stretch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose import thresholds as th
from rlctl.diagnose.table import RunLog, Series

#: Minimum number of values of a trend, and maximum number of points (medians of blocks) a line is fitted to.
MIN_VALUES, MAX_POINTS = 12, 24
#: Probability that the level is reached within the interval.
COVERAGE = 0.8
#: Standard error of the future slope as a share of the slope, and number of standard errors by which a slope
#: must differ from 0. The first is fitted to development runs, see docs/explanation/forecast-validation.md.
SLOPE_WANDER, SLOPE_ERRORS = 0.65, 4.0
#: Standard errors by which the slope of a half and the newest values may deviate from the line, in addition
#: to a tolerance of this share of the slope.
OFF_LINE, OFF_LINE_SHARE = 2.5, 0.25
#: Length of the next stretch that is tried, as a share of the previous one.
SHORTER = 0.7
#: A forecast reaches at most this many times the length of the fitted stretch ahead.
REACH = 1.0
#: Mean length, as a share of the longest allowed, at which nearly every response is cut off.
LENGTH_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Level:
    """A level to forecast."""

    key: str  # the metric
    value: float  # the level, the most severe one of the metric
    is_floor: bool = False  # the metric must stay above the level, not below
    bounds: tuple[float, float] | None = None  # range of the metric's values; None: it has no upper bound
    is_absolute: bool = False  # the metric's absolute value is compared


@dataclass(frozen=True, slots=True)
class Forecast:
    """A level that a metric reaches if its trend continues."""

    level: Level
    value: float  # median of the newest values
    #: first_step, last_step: steps that the line is fitted to
    first_step: int
    last_step: int
    step: int  # step at which the line reaches the level
    #: low, high: steps between which the metric reaches the level with probability `COVERAGE`
    low: int
    high: int
    scale: str  # on which the trend is straight: `linear`, `log` or `logit`
    slope_errors: float = field(compare=False)  # the slope divided by its standard error

    def __str__(self) -> str:
        """One sentence."""
        way = "falls" if self.level.is_floor else "rises"
        name = f"|{self.level.key}|" if self.level.is_absolute else self.level.key
        return (
            f"{name} {way} (about {self.value:.3g} at step {self.last_step:,}) and reaches the "
            f"level {self.level.value:.3g} at about step {self.step:,} ({COVERAGE * 100:.0f} % interval "
            f"{self.low:,}–{self.high:,}) if the trend since step {self.first_step:,} continues"
        )


def forecasts(run: RunLog, slope_errors: float = SLOPE_ERRORS) -> tuple[Forecast, ...]:
    """Forecasts of all metrics with a trend towards their critical level, the soonest first."""
    each = (forecast(run.table.series(level.key), level, slope_errors) for level in levels_of(run))
    # A metric that is no longer logged may have a forecast before the last step.
    found = (one for one in each if one and one.step >= run.table.steps[-1])
    return tuple(sorted(found, key=lambda one: one.step))


def levels_of(run: RunLog) -> Iterator[Level]:
    """The levels that apply to this run: the most severe ones of rules, and levels of length and reward."""
    ess = th.RAW_ESS if th.RAW_ESS.key in run.table.columns else th.ESS
    yield Level(ess.key, ess.tiers[-1][1], is_floor=True, bounds=(0.0, 1.0))
    is_penalised = run.facts.kl_coef != 0.0
    for one in (th.K3, th.KL, th.GRAD_NORM, *(th.REF_KL if is_penalised else ())):
        yield Level(one.key, one.tiers[-1][1], is_absolute=one.absolute)
    if not (run.has_gained or run.has_learned):  # otherwise it falls because the policy learns
        yield Level(th.ENTROPY.key, th.ENTROPY.tiers[-1][1], is_floor=True)
    yield Level(th.TRUNCATED.key, th.TRUNCATED.tiers[-1][1], bounds=(0.0, 1.0))
    if limit := run.facts.max_response_length:
        yield Level(th.LENGTH, LENGTH_SHARE * limit, bounds=(0.0, float(limit)))
    if span := run.reward_span:
        floor = span[0] + th.FLAT_REWARD * (span[1] - span[0])
        yield Level(th.SCORE, floor, is_floor=True, bounds=span)


def forecast(series: Series, level: Level, slope_errors: float = SLOPE_ERRORS) -> Forecast | None:
    """Forecasts when the series reaches the level; None without a trend towards it, or if it is past it."""
    from scipy.stats import t

    values, count = np.abs(series.values) if level.is_absolute else series.values, len(series)
    if count < MIN_VALUES:
        return None
    newest = _median(values[-th.MIN_STEPS :])
    if newest <= level.value if level.is_floor else newest >= level.value:
        return None
    ahead = (series.steps - series.steps[-1]).astype(np.float64)
    lines: list[tuple[_Line, str, float]] = []
    while not lines:
        if count < MIN_VALUES:
            return None
        x, fitted = ahead[-count:], values[-count:]
        each = ((_Line.through(x, y), scale, target) for scale, y, target in _scales(fitted, level))
        lines = [one for one in each if one[0].bend <= OFF_LINE]
        count = int(SHORTER * count)
    line, scale, target = min(lines, key=lambda one: one[0].bend)
    sure = abs(line.slope) / max(line.slope_error, 1e-300)
    if sure < slope_errors:
        return None
    found = line.reaches(target, float(t.ppf(0.5 + COVERAGE / 2.0, line.points - 2)))
    if found is None or found[0] > -REACH * x[0]:
        return None
    last = int(series.steps[-1])
    low, middle, high = (last + steps for steps in (np.floor(found[1]), round(found[0]), np.ceil(found[2])))
    return Forecast(level, newest, last + int(x[0]), last, int(middle), int(low), int(high), scale, sure)


def _median(values: NDArray[np.float64]) -> float:
    """Median of few values, several times faster than `np.median`."""
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] if len(values) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle]))


def _scales(values: NDArray[np.float64], level: Level) -> Iterator[tuple[str, NDArray[np.float64], float]]:
    """(name, values, level) on each scale that is defined for all of them."""
    yield "linear", values, level.value
    low, high = level.bounds or (0.0, np.inf)
    both = np.append(values, level.value)
    if both.min() <= low:
        return
    if level.bounds is None:
        scaled = np.log(both)
        yield "log", scaled[:-1], float(scaled[-1])
    elif both.max() < high:
        scaled = np.log(both - low) - np.log(high - both)
        yield "logit", scaled[:-1], float(scaled[-1])


@dataclass(frozen=True, slots=True)
class _Line:
    """A Theil–Sen line; x is relative to the newest step."""

    slope: float
    slope_error: float  # its standard error
    now: float  # value of the line at x = 0
    center: float  # mean x, where value and slope are independent
    center_error: float  # standard error of the value there
    points: int  # number of points that the line was fitted to
    bend: float  # largest deviation of a half's slope, or of the newest values, from it in standard errors

    @classmethod
    def through(cls, x: NDArray[np.float64], y: NDArray[np.float64]) -> _Line:
        """Fits a line to (M,) values, M ≥ `MIN_VALUES`; many values are replaced by medians of blocks."""
        if len(x) > MAX_POINTS:
            parts = np.array_split(np.arange(len(x)), MAX_POINTS)
            x, y = (np.array([_median(of[part]) for part in parts]) for of in (x, y))
        slope, slope_error, now, error = _theil_sen(x, y)
        half, newest = len(x) // 2, max(3, len(x) // 6)
        halves = [_theil_sen(x[part], y[part]) for part in (slice(half), slice(-half, None))]
        # The smaller error of both halves, because a half that is not straight has large residuals.
        half_error, half_center_error = (min(half[i] for half in halves) for i in (1, 3))
        off = [(abs(part_slope - slope), half_error) for part_slope, *_ in halves]
        rest = _median(y[-newest:] - slope * x[-newest:]) - now
        length = float(x[-1] - x[0])
        off.append((abs(rest) / length, 1.25 * half_center_error * np.sqrt(half / newest) / length))
        ease = OFF_LINE_SHARE * abs(slope)
        beyond = [max(distance - ease, 0.0) / max(limit, 1e-300) for distance, limit in off]
        return cls(slope, slope_error, now, float(x.mean()), error, len(x), max(beyond))

    def reaches(self, level: float, quantile: float) -> tuple[float, float, float] | None:
        """x at which the line meets the level, and the first and last x at which its band contains the level.

        None where the line leads away from the level, or there is no last such x.
        """
        gap, slope, squared = level - self.now, self.slope, quantile**2
        spread = squared * self.slope_error**2
        a = slope**2 * (1.0 - squared * SLOPE_WANDER**2) - spread
        if gap * slope <= 0.0 or a <= 0.0:
            return None
        b = gap * slope - spread * self.center
        c = gap**2 - squared * self.center_error**2 - spread * self.center**2
        root = np.sqrt(max(b**2 - a * c, 0.0))
        return gap / slope, max(float(b - root) / a, 0.0), float(b + root) / a


def _theil_sen(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Slope and its standard error; the line's value at x = 0; its standard error at the mean x."""
    left, right = np.triu_indices(len(x), 1)
    slope = _median((y[right] - y[left]) / (x[right] - x[left]))
    rest = y - slope * x
    now = _median(rest)
    rest -= now
    count = len(x)
    noise = 1.4826 * _median(np.abs(rest)) * (1.0 + 2.0 / count)
    signs = np.sign(rest)
    rho = float(np.sin(np.pi / 2.0 * np.mean(signs[1:] * signs[:-1]))) + 2.0 / count
    rho = min(max(rho, 0.0), 0.9)
    error = noise * np.sqrt((1.0 + rho) / (1.0 - rho) / count)
    return slope, float(error / x.std()), now, float(error)
