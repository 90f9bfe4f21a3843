"""Standard errors and 95 % confidence intervals of a mean over questions.

Responses to one question resemble each other, so the question is the observation: the estimators take one
value per question, the mean over its responses. The standard error is s / √N, s the standard deviation of the
N values with N − 1 in its denominator. It is the standard error clustered by question, with the small-sample
factor N / (N − 1), of a mean in which each question has the same weight (Miller 2024, arXiv 2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

LEVEL = 0.95
#: Chance to see a difference that exists.
POWER = 0.8
#: Values no further apart than this are alike: 0.1 + 0.1 + 0.1 is not three times 0.1 in floating point.
_ALIKE = 1e-9


@dataclass(frozen=True, slots=True)
class IntervalFigure:
    """A mean over questions and its 95 % confidence interval."""

    value: float  # the mean
    #: low, high: the interval; None for one question, and for equal values outside [0, 1]
    low: float | None
    high: float | None
    num_questions: int  # values it is made of
    stderr: float | None = None  # standard error of the mean; 0 for equal values, None for one question


def estimate(per_question: Sequence[float], *, is_share: bool = True) -> IntervalFigure | None:
    """Mean and interval of one value per question; None without any.

    Values that are shares, and in [0, 1], get Wilson's interval with the effective sample size of the
    clustered mean, p (1 − p) / variance, and Student's quantile (Dean and Pagano 2015): close to its level
    for ten questions and near 0 and 1, where mean ± t·error is not (tests/unit/evaluate simulates it).
    Others get mean ± t·error.
    """
    count = len(per_question)
    if count == 0:
        return None
    mean = math.fsum(per_question) / count
    if count == 1:
        return IntervalFigure(mean, None, None, count)
    from scipy.stats import t

    quantile = float(t.ppf((1.0 + LEVEL) / 2.0, count - 1))
    deviations = math.fsum((value - mean) ** 2 for value in per_question)
    is_alike = max(per_question) - min(per_question) < _ALIKE
    variance = 0.0 if is_alike else deviations / (count - 1) / count
    stderr = math.sqrt(variance)
    if is_share and min(per_question) >= 0.0 and max(per_question) <= 1.0:
        return IntervalFigure(mean, *_wilson(mean, variance, count, quantile), count, stderr)
    if variance == 0.0:
        return IntervalFigure(mean, None, None, count, stderr)
    reach = quantile * stderr
    return IntervalFigure(mean, mean - reach, mean + reach, count, stderr)


@dataclass(frozen=True, slots=True)
class Difference(IntervalFigure):
    """A mean of per-question differences, its interval (None for equal ones), and Student's paired test."""

    #: chance of a mean this far from 0 if there were no difference; None without interval
    p_value: float | None = None
    deviation: float | None = None  # standard deviation of the differences; None for a single question


def paired(differences: Sequence[float]) -> Difference | None:
    """Mean, interval and test of one difference per question; None without any."""
    found = estimate(differences, is_share=False)
    if found is None:
        return None
    if found.stderr is None:
        return Difference(found.value, None, None, found.num_questions)
    from scipy.stats import t

    count, error = found.num_questions, found.stderr
    p_value = 2.0 * float(t.sf(abs(found.value) / error, count - 1)) if error else None
    return Difference(**asdict(found), p_value=p_value, deviation=error * math.sqrt(count))


def questions_needed(deviation: float, difference: float) -> int:
    """Questions with which a paired test sees this difference in 80 % of cases, at the level above.

    The usual normal approximation, ((z₀.₉₇₅ + z₀.₈) · deviation / difference)².
    """
    from scipy.stats import norm

    quantiles = float(norm.ppf((1.0 + LEVEL) / 2.0) + norm.ppf(POWER))
    return math.ceil((quantiles * deviation / difference) ** 2)


def _wilson(mean: float, variance: float, count: int, quantile: float) -> tuple[float, float]:
    """Wilson's interval for a share estimated with this variance from so many questions."""
    spread = max(0.0, mean * (1.0 - mean))
    # Without any spread the questions themselves are all that is known.
    size = spread / variance if variance > 0.0 else count - 1
    square = quantile**2 / size
    centre = (mean + square / 2.0) / (1.0 + square)
    reach = math.sqrt(square * (spread + square / 4.0)) / (1.0 + square)
    return max(0.0, centre - reach), min(1.0, centre + reach)
