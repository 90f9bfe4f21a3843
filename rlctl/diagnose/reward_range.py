"""Rewards of a run, relative to its best and its worst single reward."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose import thresholds as th
from rlctl.diagnose.table import Series, Table

SCORE, BEST, WORST = "critic/score/mean", "critic/score/max", "critic/score/min"
#: Validation scores, one per data source.
VALIDATION = "val/<data_source>/reward_mean"
#: Mean reward, as a share of its range, from which the data counts as learned, and as mostly right.
LEARNED, MOSTLY_RIGHT = 0.9, 0.5


def reward_span(table: Table) -> tuple[float, float] | None:
    """The worst and the best single reward of the run; None where they are not logged, or equal."""
    best, worst = table.series(BEST).values, table.series(WORST).values
    if len(best) == 0 or len(worst) == 0 or best.max() <= worst.min():
        return None
    return float(worst.min()), float(best.max())


def position_of(table: Table, score: float | None) -> float | None:
    """Position of a mean reward between the worst (0) and the best (1) single reward; None where unknown."""
    span = reward_span(table)
    return None if score is None or span is None else (score - span[0]) / (span[1] - span[0])


def has_learned(table: Table) -> bool:
    """Whether the newest mean rewards are near the best single reward."""
    score = table.series(SCORE).values
    position = position_of(table, float(np.median(score[-th.WINDOW :])) if len(score) else None)
    return position is not None and position >= LEARNED


def has_gained(table: Table) -> bool:
    """Whether the mean reward rose over the run by at least `FLAT_REWARD` of its range."""
    score = table.series(SCORE).values
    if len(score) < 2 * th.MIN_STEPS:
        return False
    before, after = (position_of(table, end) for end in ends(score, min(th.WINDOW, len(score) // 2)))
    return before is not None and after is not None and after - before >= th.FLAT_REWARD


def validation_of(table: Table) -> Series:
    """The mean over data sources of the validation score, at the steps where all were validated."""
    steps, columns = table.aligned(*table.matching(VALIDATION))
    return Series(steps, np.mean(columns, axis=0))


def ends(values: NDArray[np.float64], width: int = 0) -> tuple[float, float]:
    """Medians of the first and of the last `width` values; by default of a tenth, at least a window."""
    width = width or max(th.WINDOW, len(values) // 10)
    return float(np.median(values[:width])), float(np.median(values[-width:]))
