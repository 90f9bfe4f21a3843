"""What a few runs per setting allow to be said: intervals, tests of many differences, and of equality.

Values are paired by seed: a seed's runs share initial model and prompts, so their difference varies less
than either value. All assume that the mean over seeds is normal; with five seeds this cannot be checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

from scipy import stats

Key = TypeVar("Key")


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Mean, and its interval by Student's t; the mean itself where all values are equal."""
    mean = statistics.fmean(values)
    error = float(stats.sem(values))
    if not error > 0:
        return mean, mean, mean
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * error
    return mean, mean - half, mean + half


def p_different(differences: Sequence[float]) -> float:
    """Of the paired t-test that the mean difference is 0, two-sided."""
    if len(set(differences)) == 1:
        return float(differences[0] == 0)
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def p_not_equivalent(differences: Sequence[float], margin: float) -> float:
    """Of two one-sided t-tests (TOST, Schuirmann 1987) that the mean difference is not within ± `margin`."""
    if len(set(differences)) == 1:
        return float(abs(differences[0]) >= margin)
    above = stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    return float(max(above, below))


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Adjusted p-values (Holm 1979): those below α are wrong with at most chance α, all of them together."""
    adjusted: dict[Key, float] = {}
    largest = 0.0
    for rank, key in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[key]))
        adjusted[key] = largest
    return adjusted
