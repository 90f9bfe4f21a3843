"""rlctl's own `metrics.jsonl`: one flat JSON object per step."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from rlctl.diagnose.table import Table
from rlctl.metric_names import METRICS

_STEP = "step"


def recognises(lines: Iterable[bytes]) -> bool:
    """Whether the first lines of a file look like ours: a step and a metric we know, at top level."""
    for line in lines:
        row = _parse(line)
        if row is not None and not METRICS.keys().isdisjoint(row):
            return True
    return False


def read(lines: Iterable[bytes], wanted: Collection[str]) -> tuple[Table, tuple[str, ...]]:
    """One pass over the lines, keeping the wanted columns only.

    A line that is no JSON object with a step (the half line a killed process leaves) is passed over. When the
    steps go back, as after a restart, what was logged later counts.

    Returns:
        The table, and notes on what had to be tolerated.
    """
    steps = array("q")
    columns = {key: array("d") for key in wanted}
    nonfinite: dict[str, list[int]] = {}
    names: set[str] = set()
    num_unreadable = 0
    for line in lines:
        if not line.strip():
            continue
        row = _parse(line)
        if row is None:
            num_unreadable += 1
            continue
        steps.append(row[_STEP])
        names.update(row)
        for key, column in columns.items():
            number = _number(row[key]) if key in row else None
            if number is not None and not math.isfinite(number):
                nonfinite.setdefault(key, []).append(row[_STEP])
            column.append(math.nan if number is None else number)
    notes = [f"{num_unreadable} unreadable line(s) passed over"] if num_unreadable else []
    numbers = np.asarray(steps, dtype=np.int64)
    kept = _last_pass(numbers)
    if not kept.all():
        notes.append(f"steps go back: {int((~kept).sum())} row(s) logged again later are left out")
    table = Table(
        steps=numbers[kept],
        columns={key: np.asarray(column)[kept] for key, column in columns.items() if key in names},
        nonfinite={key: np.intersect1d(found, numbers[kept]) for key, found in nonfinite.items()},
        names=frozenset(names),
    )
    return table, tuple(notes)


def _parse(line: bytes) -> dict[str, Any] | None:
    """A row with an integer step; None for anything else."""
    try:
        row = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get(_STEP)) is not int or abs(row[_STEP]) >= 1 << 62:
        return None
    return row


def _number(value: object) -> float | None:
    """A number, or one of the names JSON lacks numbers for; None for anything else."""
    if isinstance(value, str) and value not in {"NaN", "Infinity", "-Infinity"}:
        return None
    if isinstance(value, str | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def _last_pass(steps: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(N,) bool: rows whose step is below every later one."""
    if len(steps) == 0:
        return np.empty(0, dtype=bool)
    lowest_later = np.minimum.accumulate(steps[::-1])[::-1][1:]
    return np.append(steps[:-1] < lowest_later, True)
