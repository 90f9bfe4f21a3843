"""Converts logged rows to one series per name, sorted by step, without rows that a restart repeated.

A log may have several clocks, where a clock is a sequence of steps that one writer counts. Most logs have
one clock. But evaluations may be logged late, slime counts updates and rollouts separately, and TensorBoard
stores every metric separately.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Usual names of the step.
STEP_KEYS = (
    *("step", "train/global_step", "eval/global_step", "train/step", "rollout/step", "eval/step"),
    *("global_step", "training/global_step", "trainer/global_step", "_step", "Step", "iteration", "iter"),
    *("current_steps", "global_step/max_steps", "training_step"),
)
MAIN, EVAL = "main", "eval"
#: Larger numbers are not steps.
_LARGEST_STEP = 1 << 62
#: Larger numbers count as overflow: this is far beyond single precision, and its square is still finite.
_LARGEST_VALUE = 1e100

OWN_CLOCKS = frozenset({"train/step", "rollout/step"})
_IS_EVAL = re.compile(r"eval|val[-_/]|validation|test[-_/]")
_GROUPED = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_IS_META = re.compile(r"(?:train(?:ing)?/)?(?:epoch|time|timestamp|total_flos|global_step|num_tokens)|_\w+")


#: Values, and whether each was logged; both (n,).
Logged = tuple["NDArray[np.float64]", "NDArray[np.bool_]"]


@dataclass(slots=True)
class _Column:
    """Finite values of one name on one clock, with their rows; `bad`: rows with any other number."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    bad: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class _Clock:
    """Rows counted by one writer: their steps, positions in the log, and indices of their sets of names."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    order: array[int] = field(default_factory=lambda: array("q"))
    layouts: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, _Column] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Shared properties of rows with the same keys; `columns`: the wanted names with their columns."""

    clock: _Clock
    number: int
    step_key: str
    columns: tuple[tuple[str, _Column], ...]
    has_nulls: bool  # the first of these rows has nulls, where later ones may have objects


@dataclass(frozen=True, slots=True)
class Collected:
    """The content of one log, under the names in the log."""

    steps: NDArray[np.int64]  # (N,) every step of the log, ascending
    #: name → (N,) values without those repeated later, NaN where no finite number was logged
    columns: dict[str, NDArray[np.float64]]
    #: name → steps at which NaN, an infinity, or a number beyond 1e100 was logged
    nonfinite: Mapping[str, NDArray[np.int64]]
    names: frozenset[str]  # every name in the log, including those not kept
    #: number of updates per rollout, where the log counts both; otherwise None
    updates_per_rollout: int | None
    notes: tuple[str, ...]  # problems that were tolerated


class Collector:
    """Collects the values of rows under wanted names; memory grows only with these and the number of rows."""

    def __init__(self, keeps: Callable[[str], bool], step_keys: Sequence[str] = STEP_KEYS) -> None:
        self.keeps = keeps  # whether a name is wanted
        self.step_keys = step_keys  # names of the step; the first one that a row has is used
        self.names: set[str] = set()  # every name in the rows
        self.null_is_nan = False  # whether null means NaN (which JSON cannot express), not "not logged"
        self.num_rows = 0
        self.last_step = 0  # of the newest row
        self._clocks: dict[str, _Clock] = {}
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self._nested: set[tuple[str, ...]] = set()
        self._name_sets: dict[frozenset[str], int] = {}
        self._num_fractions = 0  # rows whose step is no whole number

    def add(self, row: Mapping[str, Any]) -> bool:
        """Adds one row; False if it has no step."""
        keys = tuple(row)
        if keys in self._nested:
            row = dict(_flat(row))
            keys = tuple(row)
        layout = self._layouts.get(keys)
        if layout is None or layout.has_nulls or not layout.columns:
            if dict in map(type, row.values()):
                self._nested.add(keys)
                return self.add(row)
            layout = layout or self._layout(row)
        step = None if layout is None else _whole(row[layout.step_key])
        if layout is not None and step is None and (step := _rounded_down(row[layout.step_key])) is not None:
            self._num_fractions += 1
        if layout is None or step is None:
            if layout is None or layout.step_key not in OWN_CLOCKS:
                return False
            # In a table, the row of one clock has the steps of the others as empty cells.
            return self.add({key: value for key, value in row.items() if key != layout.step_key})
        place = self._add_steps(layout.clock, layout.number, [step])
        for name, column in layout.columns:
            value = row[name]
            number = value if type(value) is float else as_number(value)
            if abs(number) <= _LARGEST_VALUE:
                column.rows.append(place)
                column.values.append(number)
            elif self.null_is_nan if value is None else _is_number(value):
                column.bad.append(place)
        return True

    @property
    def num_known(self) -> int:
        """Number of wanted metrics with at least one value, finite or not."""
        columns = [item for clock in self._clocks.values() for item in clock.columns.items()]
        return len({name for name, column in columns if len(column.rows) or len(column.bad)})

    def renumber(self, steps: Sequence[int]) -> None:
        """Replaces every step s by `steps[s]`."""
        for clock in self._clocks.values():
            clock.steps = array("q", (steps[step] for step in clock.steps))
        self.last_step = steps[self.last_step]

    def _add_steps(self, clock: _Clock, number: int, steps: Sequence[int]) -> int:
        """Appends rows with the same set of names to a clock; returns the index of the first."""
        first = len(clock.steps)
        clock.steps.extend(steps)
        clock.order.extend(range(self.num_rows, self.num_rows + len(steps)))
        clock.layouts.extend([number] * len(steps))
        self.num_rows += len(steps)
        self.last_step = steps[-1] if steps else self.last_step
        return first

    def add_columns(self, clock: str, steps: NDArray[np.int64], columns: Mapping[str, Logged]) -> None:
        """Adds n rows at once to the clock of that name; steps are (n,)."""
        self.names.update(columns)
        rows = self._clocks.setdefault(clock, _Clock())
        first = self._add_steps(rows, self._number_of(frozenset(columns)), steps.tolist())
        places = np.arange(first, first + len(steps))
        for name, (values, was_logged) in columns.items():
            column = rows.columns.setdefault(name, _Column())
            is_finite = np.abs(values) <= _LARGEST_VALUE
            column.rows.extend(places[is_finite].tolist())
            column.values.extend(values[is_finite].tolist())
            column.bad.extend(places[was_logged & ~is_finite].tolist())

    def finish(self) -> Collected:
        """Merges all clocks into one axis of steps; the collector is empty afterwards."""
        kept = {}
        notes = []
        for name, clock in self._clocks.items():
            in_order = _goes_back_by_restarts_only(clock, list(self._name_sets))
            own = np.array(clock.steps)
            kept[name] = _last_pass(own) if in_order else np.ones(len(own), dtype=bool)
            notes += [] if in_order else ["the rows are out of order: they are sorted by step"]
        twice = sum(_logged_twice(clock, kept[name]) for name, clock in self._clocks.items())
        if twice:
            why = "two processes in one log?"
            notes.append(f"{twice} steps are logged twice with other values ({why}): the last counts")
        self._drop_stale_evaluations(kept)
        ratio = _updates_per_rollout(self._clocks)
        steps = {name: np.array(clock.steps, dtype=np.int64) for name, clock in self._clocks.items()}
        if ratio:
            steps = {name: own // ratio if _family(name) == "train" else own for name, own in steps.items()}
        last_pass = [own[kept[name]] for name, own in steps.items()]
        axis = np.unique(np.concatenate(last_pass)) if last_pass else np.empty(0, dtype=np.int64)
        columns: dict[str, NDArray[np.float64]] = {}
        nonfinite: dict[str, NDArray[np.int64]] = {}
        for name, clock in self._clocks.items():
            places = np.searchsorted(axis, steps[name])
            while clock.columns:  # column by column, so that the values are not in memory twice
                key, column = clock.columns.popitem()
                values = columns.setdefault(key, np.full(len(axis), np.nan))
                rows = np.array(column.rows, dtype=np.int64)
                use = kept[name][rows]
                values[places[rows[use]]] = np.array(column.values)[use]  # the last value of a step is kept
                bad = [row for row in column.bad if kept[name][row]]
                if bad:
                    nonfinite[key] = np.union1d(nonfinite.get(key, axis[:0]), steps[name][bad])
        if self._num_fractions:
            notes.append(f"{self._num_fractions} steps are no whole numbers: they are rounded down")
        left_out = sum(int((~rows).sum()) for rows in kept.values())
        if left_out:
            notes.append(f"steps go back: {left_out} row(s) that were logged again later are omitted")
        if ratio and ratio > 1:
            notes.append(f"{ratio} updates per rollout: a step is a rollout, its last update is shown")
        names = frozenset(self.names)
        return Collected(
            steps=axis,
            columns=columns,
            nonfinite=nonfinite,
            names=names,
            updates_per_rollout=ratio,
            notes=tuple(notes),
        )

    def _layout(self, row: Mapping[str, Any]) -> _Layout | None:
        step_key = next((key for key in self.step_keys if key in row), None)
        if step_key is None:
            return None
        self.names.update(row)
        metrics = [key for key in row if key not in self.step_keys]
        clock = self._clocks.setdefault(_clock_of(step_key, metrics), _Clock())
        names = filter(self.keeps, metrics)
        kept = tuple((name, clock.columns.setdefault(name, _Column())) for name in names)
        layout = _Layout(
            clock=clock,
            number=self._number_of(frozenset(metrics)),
            step_key=step_key,
            columns=kept,
            has_nulls=None in row.values(),
        )
        return self._layouts.setdefault(tuple(row), layout)

    def _number_of(self, names: frozenset[str]) -> int:
        return self._name_sets.setdefault(names, len(self._name_sets))

    def _drop_stale_evaluations(self, kept: dict[str, NDArray[np.bool_]]) -> None:
        """Drops evaluations that a restart repeats: those of steps that the main rows log again later."""
        if not kept.keys() >= {MAIN, EVAL} or kept[MAIN].all():
            return
        main = self._clocks[MAIN]
        evals = self._clocks[EVAL]
        steps = np.array(main.steps)
        lowest_later = np.append(np.minimum.accumulate(steps[::-1])[::-1], _LARGEST_STEP)
        next_main = np.searchsorted(np.array(main.order), np.array(evals.order))
        # Evaluations that are only logged late are kept: no later main row has a lower step.
        kept[EVAL] = np.array(evals.steps) <= lowest_later[next_main]


def as_number(value: object) -> float:
    """The value of a number, or of its text (`0.5`, `1,234`, `NaN`, `-Infinity`); NaN for anything else."""
    if isinstance(value, str | int | float):
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]
        except ValueError:
            if isinstance(value, str) and _GROUPED.fullmatch(value.strip()):
                return float(value.replace(",", ""))
            return float("nan")
    return float("nan")


def _is_number(value: object) -> bool:
    """Whether a value is a number that cannot be stored as finite: NaN, infinite, or too large.

    A text counts only if it is NaN or infinite.
    """
    if isinstance(value, str):
        return value.strip().lower().lstrip("+-") in {"nan", "inf", "infinity"}
    return isinstance(value, int | float)


def _whole(value: object) -> int | None:
    """A step: a whole number of any type, or a text such as `5/547`; None for anything else."""
    if type(value) is not int:
        if isinstance(value, str) and "/" in value:
            value = value.partition("/")[0]
        number = as_number(value) if not isinstance(value, bool) else float("nan")
        if not number.is_integer():
            return None
        value = int(number)
    return value if -_LARGEST_STEP < value < _LARGEST_STEP else None


def _rounded_down(value: object) -> int | None:
    """A step that is no whole number, rounded down; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, float | str):
        return None
    number = as_number(value)
    return int(number // 1) if abs(number) < _LARGEST_STEP else None


def _logged_twice(clock: _Clock, kept: NDArray[np.bool_]) -> int:
    """Number of steps that neighbouring rows log, under one name, with other values."""
    steps = np.array(clock.steps, dtype=np.int64)
    twice = set()
    for column in clock.columns.values():
        rows = np.array(column.rows, dtype=np.int64)
        use = kept[rows]
        own = steps[rows[use]]
        values = np.array(column.values)[use]
        again = (np.diff(own) == 0) & (np.diff(values) != 0.0)
        twice |= set(own[1:][again].tolist())
    return len(twice)


def is_step_or_time(name: str) -> bool:
    """Whether a name is a step or a time, not a metric."""
    return name in STEP_KEYS or _IS_META.fullmatch(name) is not None


def _clock_of(step_key: str, metrics: Sequence[str]) -> str:
    if step_key in OWN_CLOCKS:
        return step_key
    own = [name for name in metrics if not _IS_META.fullmatch(name)]
    return EVAL if own and all(_IS_EVAL.match(name) for name in own) else MAIN


def _family(clock: str) -> str:
    return clock.partition("/")[0]


def _updates_per_rollout(clocks: Mapping[str, _Clock]) -> int | None:
    """Updates per rollout, from the clocks `train/…` and `rollout/…`, which count from 0; else None.

    A rollout that no update follows may not be trained on yet, and does not count.
    """
    last = {"train": -1, "rollout": -1}
    held = [(_family(name), clock) for name, clock in clocks.items() if clock.steps]
    newest = max((clock.order[-1] for family, clock in held if family == "train"), default=-1)
    for family, clock in held:
        if family in last:
            steps = np.array(clock.steps)
            is_followed = np.array(clock.order) <= newest  # in TensorBoard, clocks are in any order
            last[family] = max(last[family], int(steps[is_followed if is_followed.any() else ...].max()))
    if min(last.values()) < 0:
        return None
    return max(1, round((last["train"] + 1) / (last["rollout"] + 1)))


def _goes_back_by_restarts_only(clock: _Clock, name_sets: Sequence[frozenset[str]]) -> bool:
    """Whether restarts explain every row whose step is below that of the row before.

    After a restart, such a row repeats a metric at a step where it was logged before. Shuffled rows, or rows
    of alternating writers, go back to new steps or metrics.
    """
    steps = np.array(clock.steps)
    if not (steps[1:] < steps[:-1]).any():
        return True
    logged: dict[int, set[int]] = {}
    before = clock.steps[0]
    for step, layout in zip(clock.steps, clock.layouts, strict=True):
        known = logged.get(step, ())
        if step < before and all(name_sets[layout].isdisjoint(name_sets[one]) for one in known):
            return False
        logged.setdefault(step, set()).add(layout)
        before = step
    return True


def _last_pass(steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(N,) bool: rows whose step is below all later steps; consecutive rows of one step count as one."""
    if len(steps) == 0:
        return np.empty(0, dtype=bool)
    starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
    runs = steps[starts]
    lowest_later = np.append(np.minimum.accumulate(runs[::-1])[::-1][1:], _LARGEST_STEP)
    return np.repeat(runs < lowest_later, np.diff(np.append(starts, len(steps))))


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flattens nested objects to paths; wrappers such as verl's `data` are left out of the path."""
    for key, value in row.items():
        if isinstance(value, dict):
            is_wrapper = not prefix and key in {"data", "metrics", "logs"}
            yield from _flat(value, "" if is_wrapper else f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
