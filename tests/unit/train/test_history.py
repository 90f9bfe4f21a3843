"""The metrics of all steps, as the guardrails and the summary read them."""

from __future__ import annotations

import math
import tracemalloc

import pytest

from rlctl.train.history import History

ROWS = [
    {"step": 0.0, "val/a": 0.5},
    {"step": 1.0, "a": 1.5, "b": -2.0},
    {"step": 2.0, "b": 3.0, "a": 1e300},  # in another order
    {"step": 3.0, "a": math.inf, "b": 0.1, "val/a": 0.25},
    {"step": 4.0, "a": 2.0, "b": 4.0},
]


def test_steps_are_as_they_were_logged() -> None:
    history = History(ROWS[:2])
    for row in ROWS[2:]:
        history.append(row)
    assert [dict(step) for step in history] == ROWS
    assert [list(step) for step in history] == [list(row) for row in ROWS]
    assert [dict(step) for step in history[-2:]] == ROWS[-2:]
    assert (len(history), history[-1]["step"], history[1].get("val/a")) == (5, 4.0, None)
    assert any(key.startswith("val/") for key in history[0])
    with pytest.raises(KeyError):
        history[0]["a"]


def test_not_a_number_stays_one() -> None:
    assert math.isnan(History([{"step": 1.0, "a": math.nan}])[0]["a"])


def test_a_step_takes_about_eight_bytes_per_metric() -> None:
    history, keys = History(), [f"metric/{number}" for number in range(136)]
    history.append(dict.fromkeys(keys, 0.0))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(500):
            history.append(dict.fromkeys(keys, number + 0.5))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 136 * 8 <= grown / 500 <= 1.3 * 136 * 8
