"""Content of console output: rows grouped by their form, settings of the run, and the first error.

The rows of the form with the most metrics are used as the log.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlctl.diagnose.readers.collect import STEP_KEYS, Collector
from rlctl.diagnose.readers.reading import LogReading
from rlctl.diagnose.table import COUNTED, Framework, LoggedException, LoggedWarning

Row = dict[str, float | None]

#: A printed dictionary is a trainer's row only with one of these keys, several known names with `/`, or many
#: known names; graders and data loaders print dictionaries without them.
_TRAINER_KEYS = frozenset(
    {*STEP_KEYS, "epoch", "loss", "train_loss", "eval_loss", "grad_norm", "learning_rate", "lr"}
)
_MANY_PATHS, _MANY_NAMES = 3, 4
#: Keys that occur in configurations as well as in rows.
_SETTINGS = frozenset({"learning_rate", "lr"})
_OF_ANY_ROW = frozenset({*STEP_KEYS, "epoch"})
_BAR = re.compile(r"\d{1,3}%\|[^|]*\|\s*(?P<done>\d{1,18})/(?P<all>\d{1,18}) \[[^\]]*\]?")
_MOST_BARS = 8


@dataclass(slots=True)
class _Form:
    """Rows of one form."""

    collector: Collector
    framework: Framework | None  # the framework that prints this form, if only one does
    count: int = 0  # rows without a step, not counting evaluations
    epochs: list[float] = field(default_factory=list)  # epoch of each of these rows
    #: for each of these rows, total → position of every progress bar
    bars: list[dict[int, int]] = field(default_factory=list)


class PrintedRows:
    """Collects rows of any form; `finish` keeps the rows of the form with the most metrics."""

    def __init__(self, reading: LogReading) -> None:
        self._reading = reading
        self._forms: dict[str, _Form] = {}
        self._bars: dict[int, int] = {}
        self.wants = reading.collector.keeps
        self._newest: dict[str, float] = {}
        self.has_restarted = False  # whether the newest row goes back, in its steps or its epochs

    @property
    def num_rows(self) -> int:
        """Number of rows of the form with the most rows."""
        return max((form.collector.num_rows for form in self._forms.values()), default=0)

    def progress(self, text: str) -> bool:
        """Records the positions of the trainer's progress bars; True if the last one is full."""
        is_full = False
        end = 0
        for bar in _BAR.finditer(text):
            what = text[end : bar.start()].strip()
            end = bar.end()
            if (not what or "train" in what.lower()) and len(self._bars) < _MOST_BARS:
                self._bars[int(bar["all"])] = int(bar["done"])
                is_full = bar["all"] == bar["done"]
        return is_full

    def add_dictionary(self, row: Row, step: int | None = None) -> bool:
        """Adds a printed dictionary if it is a trainer's row; `step`: as the line above it states, if any."""
        # `train_runtime` marks the summary of the whole run.
        if len(row) < 2 or "train_runtime" in row:
            return False
        if "loss" not in row and any(name.startswith("eval_") for name in row):
            # Some trainers add the prefix only to some of the names.
            is_named = {name: name in _OF_ANY_ROW or name.startswith("eval_") for name in row}
            row = {name if is_named[name] else f"eval_{name}": value for name, value in row.items()}
        names = row.keys() - _SETTINGS
        if step is not None and any(map(self.wants, names)):
            return self.add("numbered dictionary", {**row, "step": step})
        known = [name for name in names if self.wants(name) or name.startswith("eval_")]
        paths = sum("/" in name for name in known)
        is_many = paths >= _MANY_PATHS or (paths > 0 and len(known) >= _MANY_NAMES)
        is_trainers = is_many or not names.isdisjoint(_TRAINER_KEYS)
        if not (known and is_trainers):
            return False
        step_key = next((key for key in self._reading.collector.step_keys if key in row), "")
        return self.add(f"dictionary {step_key}", row)

    def advance(self, clock: str, reading: float | None) -> None:
        """Records the step or epoch of a row."""
        if reading is not None:
            self.has_restarted = reading < self._newest.get(clock, reading)
            self._newest[clock] = reading

    def add(self, kind: str, row: Row, framework: Framework | None = None) -> bool:
        """Adds a row; a row without a step is numbered by counting."""
        if kind not in self._forms:
            self._forms[kind] = _Form(Collector(self.wants, self._reading.collector.step_keys), framework)
        form = self._forms[kind]
        clock = next((key for key in self._reading.collector.step_keys if key in row), "epoch")
        self.advance(clock, row.get(clock))
        if clock == "epoch":
            if not all(name.startswith("eval_") or name == "epoch" for name in row):
                form.count += 1
                epoch = row.get("epoch")
                before = form.epochs[-1] if form.epochs else 0.0
                form.epochs.append(before if epoch is None else epoch)
                form.bars.append(dict(self._bars))
            row = {**row, "step": form.count}
        return form.collector.add(row)

    def finish(self) -> None:
        """Passes the rows of one form to the reading, unless its JSON rows have more metrics."""
        held = [form for form in self._forms.values() if form.collector.num_known]
        if not held:
            return
        sizes = [
            (form.framework is not None, form.collector.num_known, form.collector.num_rows) for form in held
        ]
        best = held[sizes.index(max(sizes))]
        json = self._reading.collector.num_known
        known = best.collector.num_known
        if json > (2 * known if best.framework else 0) and json >= known:
            return
        self._reading.collector = best.collector
        self._reading.hint = best.framework or self._reading.hint
        if best.count:
            self._number(best)

    def _number(self, form: _Form) -> None:
        """Sets the steps of counted rows from the progress bars next to them, or from their epochs."""
        notes = self._reading.notes
        # Bars are printed above their rows, or below; then the first row has no bar above it, or one at 0.
        for bars in (form.bars, [*form.bars[1:], self._bars]):
            totals = [total for total in bars[0] if _counts(total, bars)]
            if totals:
                form.collector.renumber([0, *(bar[max(totals)] for bar in bars)])
                notes.append("the printed lines have no step: it is taken from the progress bar")
                return
        notes.append(COUNTED)
        epochs = form.epochs
        back = [index for index in range(1, len(epochs)) if epochs[index] < epochs[index - 1]]
        if not back:
            return
        if all(epochs[place] in epochs[:place] for place in back):
            form.collector.renumber([0, *_counted_again(epochs)])
            return
        order = sorted(range(len(epochs)), key=epochs.__getitem__)
        rank = {place: number for number, place in enumerate(order, 1)}
        form.collector.renumber([0, *(rank[index] for index in range(len(epochs)))])


def _counts(total: int, bars: list[dict[int, int]]) -> bool:
    """Whether the bar with this total is above 0 at every row, and advances between rows."""
    places = [bar.get(total, 0) for bar in bars]
    return all(places) and all(a != b for a, b in pairwise(places))


def _counted_again(epochs: list[float]) -> list[int]:
    """Steps of the rows of a restarted run, whose epochs go back to one that was logged before."""
    steps: list[int] = []
    passed: list[float] = []
    for epoch in epochs:
        if passed and epoch < passed[-1]:
            del passed[bisect_left(passed, epoch) :]
        passed.append(epoch)
        steps.append(len(passed))
    return steps


# --- settings ----------------------------------------------------------------------------------------

_FLAG = re.compile(
    r"(?:^|\s)--(?P<key>[A-Za-z][\w.-]*)(?:[ =]+(?P<value>[^\s'\"\\,-][^\s'\"\\,]*|-[\d.]\S*))?"
)
_OVERRIDE = re.compile(r"(?:^|\s)\+{0,2}(?P<key>[a-z_]+(?:\.\w+)+)=['\"]?(?P<value>[^\s'\"\\,]+)")
_LINE = re.compile(
    r"\s*['\"]?(?P<key>[A-Za-z][\w.]*)['\"]?\s*(?:[:=]|\.{3,})\s*['\"]?(?P<value>[^\s'\",#]+)['\"]?,?\s*(?:#.*)?$"
)
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def keep_settings(text: str, names: Collection[str], stated: dict[str, Any]) -> None:
    """Adds to `stated` a line's settings of these names; the first value counts.

    Numbers stay texts, which `Config` reads.
    """
    matches: list[re.Match[str] | None] = list(_FLAG.finditer(text)) if "--" in text else []
    if "=" in text:
        matches += _OVERRIDE.finditer(text)
    if ":" in text or "=" in text or "..." in text:
        matches.append(_LINE.match(text))
    for match in filter(None, matches):
        key = match["key"].replace("-", "_") if match.re is _FLAG else match["key"]
        if key in names:
            value = match["value"] or "true"  # a flag without a value
            stated.setdefault(key, _WORDS.get(value.lower(), value))


# --- the first error ---------------------------------------------------------------------------------

_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r"File \"(?P<file>[^\"]+)\", line (?P<line>\d+)(?:, in (?P<function>\S+))?")
_EXCEPTION = re.compile(
    r"(?:\[?rank\d+\]?:?\s*)?(?:[\w.]+::\S+.*?:\s)?"
    r"(?P<text>(?:\w+\.)*(?P<type>\w*(?:Error|Exception|Interrupt|Exit|Timeout|Died\w*))(?:\(\w+\))?(?::\s.*)?)\s*$"
)
#: Ends that are no exceptions, and errors of launchers; see the file.
_ENDS = tomllib.loads(Path(__file__).with_name("ends.toml").read_text(encoding="utf-8"))
_DEATH = re.compile("|".join([*_ENDS["died"], f"(?P<stop>{'|'.join(_ENDS['stopped'])})"]))
#: Warnings of a disk that is nearly full; at most so many are kept.
_DISK, _MOST_WARNINGS = re.compile("|".join(_ENDS["disk"])), 1000
#: Exceptions of a run that was stopped from outside.
_STOPS = frozenset({"KeyboardInterrupt", "SignalException"})
_LONGEST = 500
_LINES_BETWEEN = 200
_CUT_OFF = "an exception whose last line is not in the log"


def keep_warning(text: str, line: int, warnings: list[LoggedWarning]) -> None:
    """Adds to `warnings` what a line says of a disk that is nearly full."""
    if "full" in text and len(warnings) < _MOST_WARNINGS and (match := _DISK.search(text)):
        warnings.append(LoggedWarning(match.group().strip(), line))


class FirstError:
    """Collects errors from the lines that are not rows.

    What ends a run is followed by its consequences: errors of other ranks, of launchers, of cleaning up. So
    the first one since the last row counts, and a launcher's only if there is no other. A handled exception
    may be printed without a traceback, or far from the log's end; neither counts. Nor does an exception that
    was already printed before a row, because training continued after it; but one after which the steps go
    back ended the run, which was then restarted.
    """

    def __init__(self) -> None:
        self._found: list[tuple[LoggedException, bool]] = []  # since the last row; whether it is a launcher's
        self._last_line = 0  # of the newest error
        self._frame = ""
        self._in_traceback = False
        self._since_row: set[str] = set()
        self._survived: set[str] = set()

    def clear(self, has_restarted: bool) -> None:
        """Discards the errors found so far: a row follows, so training continued or was restarted."""
        if not has_restarted:
            self._survived |= self._since_row
        self._since_row.clear()
        self._found.clear()
        self._in_traceback = False

    def at_end(self, last_line: int) -> LoggedException | None:
        """The first error since the last row, if the errors go on to near the end of the log."""
        if not self._found and self._in_traceback:
            return LoggedException(_CUT_OFF, self._frame, last_line)
        if not self._found or last_line - self._last_line > _LINES_BETWEEN:
            return None
        return next((error for error, is_launcher in self._found if not is_launcher), self._found[0][0])

    def take(self, text: str, line: int) -> None:
        """Processes one line that is not a row."""
        if _TRACEBACK in text:
            self._in_traceback = True
            self._frame = ""
        elif 'File "' in text and (frame := _FRAME.search(text)):
            function = f", in {frame['function']}" if frame["function"] else ""
            self._in_traceback = True
            self._frame = f"{frame['file'].rpartition('/')[2]}, line {frame['line']}{function}"
        elif match := not text[:1].isspace() and self._may_raise and _EXCEPTION.match(text):
            self._keep(match["text"], match["type"], line)
        elif match := _DEATH.search(text):
            self._keep(text.strip(), "SignalException" if match["stop"] else "", line)

    @property
    def _may_raise(self) -> bool:
        """Whether a line may be an exception: below a traceback, or below another error."""
        return self._in_traceback or bool(self._found)

    def _keep(self, text: str, kind: str, line: int) -> None:
        where = self._frame if self._in_traceback else ""
        self._in_traceback = False
        known = {text[:_LONGEST], where} - {""}
        self._since_row |= known
        if known & self._survived:
            return
        if self._found and line - self._last_line > _LINES_BETWEEN:
            self._found.clear()  # it was handled
        self._last_line = line
        error = LoggedException(text[:_LONGEST], where, line, kind in _STOPS)
        self._found.append((error, kind in _ENDS["of_launchers"]))
