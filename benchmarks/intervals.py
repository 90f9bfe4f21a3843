"""Statistics for few runs per setting: intervals, multiple tests of differences and of equivalence.

Values are paired by seed: runs of one seed share initial model and prompts, so their difference varies less
than either value. All functions assume that the mean over seeds is normal; with five seeds this cannot be
checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

from scipy import stats

Key = TypeVar("Key")


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Mean and its interval by Student's t; if all values are equal, both bounds are the mean."""
    mean = statistics.fmean(values)
    error = float(stats.sem(values))
    if not error > 0:
        return mean, mean, mean
    half = _quantile((1 + level) / 2, len(values) - 1) * error
    return mean, mean - half, mean + half


@cache
def _quantile(share: float, freedom: int) -> float:
    return float(stats.t.ppf(share, freedom))


def p_different(differences: Sequence[float]) -> float:
    """p-value of the two-sided paired t-test of the null hypothesis that the mean difference is 0."""
    if len(set(differences)) == 1:
        return float(differences[0] == 0)
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def p_not_equivalent(differences: Sequence[float], margin: float) -> float:
    """p-value of the hypothesis that the mean difference is outside ± `margin` (TOST, Schuirmann 1987)."""
    if len(set(differences)) == 1:
        return float(abs(differences[0]) >= margin)
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    return float(max(above, below))


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Adjusted p-values (Holm 1979): the probability of any false rejection below level α is at most α."""
    adjusted: dict[Key, float] = {}
    largest = 0.0
    for rank, key in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[key]))
        adjusted[key] = largest
    return adjusted
