"""The runs behind the figures about forecasts, and the detection of a collapse and of a reached level."""

from collections import Counter

import numpy as np

from benchmarks.forecast import _fallen, reached_at
from benchmarks.forecast_runs import RUNS, TURN, planned
from rlctl.diagnose.forecast import Level
from rlctl.diagnose.table import Series


def test_runs_are_a_balanced_sample_split_by_cause() -> None:
    runs = [planned(number) for number in range(RUNS)]
    counts = Counter(run.cause for run in runs)
    assert counts.pop("healthy") == 200
    assert set(counts.values()) == {50}
    parts = {cause: {run.held_out for run in runs if run.cause == cause} for cause in counts}
    assert sorted(map(len, parts.values())) == [1] * 6
    assert Counter(map(frozenset, parts.values())) == {frozenset({True}): 3, frozenset({False}): 3}
    assert {run.held_out for run in runs if run.cause == "healthy"} == {True, False}
    assert [run.cause for run in runs[: len(TURN)]] == list(TURN)
    assert len({(run.seed, run.overrides, run.patch) for run in runs if run.cause != "healthy"}) == 300


def test_a_collapse_lasts_to_the_end() -> None:
    steps = np.arange(10)
    fell = np.array([0.3, 0.6, 0.8, 0.7, 0.3, 0.5, 0.3, 0.2, 0.1, 0.0])
    assert _fallen(steps, fell, 3) == 6
    assert _fallen(steps, fell[::-1], 2) is None
    assert _fallen(steps, fell, 5) is None


def test_a_level_is_reached_when_the_median_is_beyond_it() -> None:
    values = np.arange(20) / 10.0
    values[3] = 9.0
    series = Series(np.arange(20), values)
    assert reached_at(series, Level("a", 1.0), 0) == 10
    assert reached_at(series, Level("a", 1.0), 12) == 13
    assert reached_at(series, Level("a", 5.0), 0) is None
    assert reached_at(series, Level("a", 0.5, is_floor=True), 0) == 1
