"""Standard errors and 95 % confidence intervals of a mean over questions.

Responses to one question are correlated, so the question is the unit of observation: the estimators take one
value per question, the mean over its responses. The standard error is s / √N, where s is the standard
deviation of the N values with denominator N − 1. It equals the standard error clustered by question, with the
small-sample factor N / (N − 1), of a mean that weights all questions equally (Miller 2024, arXiv 2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

LEVEL = 0.95
#: Statistical power: probability to detect an existing difference.
POWER = 0.8
#: Values that differ by less count as equal: in floating point, 0.1 + 0.1 + 0.1 ≠ 3 · 0.1.
ALIKE = 1e-9


@dataclass(frozen=True, slots=True)
class IntervalFigure:
    """A mean over questions and its 95 % confidence interval."""

    value: float  # the mean
    #: low, high: the interval; None for one question, and for equal values of unknown range
    low: float | None
    high: float | None
    num_questions: int  # number of values
    stderr: float | None = None  # standard error of the mean; 0 for equal values, None for one question


#: Least and greatest possible value.
Range = tuple[float, float]
SHARE: Range = (0.0, 1.0)


def estimate(
    per_question: Sequence[float],
    *,
    bounds: Range | None = SHARE,
    least: float = -math.inf,
    most: float = math.inf,
) -> IntervalFigure | None:
    """Mean and interval of one value per question; None without values.

    Values that are known to lie within `bounds` get Wilson's interval of their place there, a share, with the
    effective sample size of the clustered mean, p (1 − p) / variance, and Student's quantile (Dean
    and Pagano 2015). For the lower end, the variance contains one more question with the least value, for the
    upper end one with the greatest: without it, questions that nearly all have the same value give a variance
    that does not include the rare other ones. Coverage is simulated in tests/unit/evaluate.

    Values without known bounds (None) get mean ± t·error, which `least` and `most` cut off, and no interval
    if all are equal: what other values there may be cannot be guessed from them.
    """
    count = len(per_question)
    if count == 0:
        return None
    mean = math.fsum(per_question) / count
    if count == 1:
        return IntervalFigure(mean, None, None, count)
    quantile = _quantile(count - 1)
    is_alike = max(per_question) - min(per_question) < ALIKE
    deviations = 0.0 if is_alike else math.fsum((value - mean) ** 2 for value in per_question)
    stderr = math.sqrt(deviations / (count - 1) / count)
    if bounds is not None:
        lowest = bounds[0]
        width = bounds[1] - bounds[0]
        share = min(1.0, max(0.0, (mean - lowest) / width))
        ends = (_wilson(share, deviations / width**2, count, quantile, end) for end in SHARE)
        low, high = (lowest + width * end for end in ends)
        return IntervalFigure(
            value=mean,
            low=low,
            high=high,
            num_questions=count,
            stderr=stderr,
        )
    if is_alike:
        return IntervalFigure(
            value=mean,
            low=None,
            high=None,
            num_questions=count,
            stderr=stderr,
        )
    reach = quantile * stderr
    return IntervalFigure(
        value=mean,
        low=max(least, mean - reach),
        high=min(most, mean + reach),
        num_questions=count,
        stderr=stderr,
    )


@dataclass(frozen=True, slots=True)
class Difference(IntervalFigure):
    """Mean of per-question differences, its interval (None if all are equal), and Student's paired test."""

    #: p-value: probability of a mean at least this far from 0 under no difference; None without interval
    p_value: float | None = None
    deviation: float | None = None  # standard deviation of the differences; None for a single question


def paired(differences: Sequence[float], *, most: float = math.inf) -> Difference | None:
    """Mean, interval and test of one difference per question, at most ±`most`; None without values."""
    estimated = estimate(differences, bounds=None, least=-most, most=most)
    if estimated is None:
        return None
    if estimated.stderr is None:
        return Difference(estimated.value, None, None, estimated.num_questions)
    from scipy.stats import t

    count = estimated.num_questions
    error = estimated.stderr
    p_value = 2.0 * float(t.sf(abs(estimated.value) / error, count - 1)) if error else None
    return Difference(**asdict(estimated), p_value=p_value, deviation=error * math.sqrt(count))


def questions_needed(deviation: float, difference: float) -> int:
    """Number of questions with which a paired test at `LEVEL` detects this difference with power 0.8.

    Uses the normal approximation ((z₀.₉₇₅ + z₀.₈) · deviation / difference)².
    """
    from scipy.stats import norm

    quantiles = float(norm.ppf((1.0 + LEVEL) / 2.0) + norm.ppf(POWER))
    return math.ceil((quantiles * deviation / difference) ** 2)


@cache
def _quantile(freedom: int) -> float:
    """Student's quantile of a two-sided interval at `LEVEL`; SciPy takes longer than all else here."""
    from scipy.stats import t

    return float(t.ppf((1.0 + LEVEL) / 2.0, freedom))


def _wilson(mean: float, deviations: float, count: int, quantile: float, end: float) -> float:
    """The end of Wilson's interval towards `end`, 0 or 1, for a share with this sum of squared deviations."""
    spread = max(0.0, mean * (1.0 - mean))
    variance = (deviations + (mean - end) ** 2) / (count - 1) / count
    # At least N − 1, the effective size for independent binary values.
    size = max(spread / variance, count - 1) if variance else count - 1
    square = quantile**2 / size
    centre = (mean + square / 2.0) / (1.0 + square)
    reach = math.sqrt(square * (spread + square / 4.0)) / (1.0 + square)
    return max(0.0, centre - reach) if end == 0.0 else min(1.0, centre + reach)
