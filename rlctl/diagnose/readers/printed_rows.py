"""Printed rows, grouped by the form they were printed in; the group with most metrics is the log's."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise

from rlctl.diagnose.readers.collect import STEP_KEYS, Collector, LogReading
from rlctl.diagnose.table import Framework

Row = dict[str, float | int | None]

#: A printed dictionary is a trainer's row only with one of these; graders and data loaders print others.
_TRAINER_KEYS = frozenset(
    {*STEP_KEYS, "epoch", "loss", "train_loss", "eval_loss", "grad_norm", "learning_rate", "lr"}
)
#: Of a configuration as well as of a row.
_SETTINGS = frozenset({"learning_rate", "lr"})
_OF_ANY_ROW = frozenset({*STEP_KEYS, "epoch"})
_BAR = re.compile(r"\d{1,3}%\|[^|]*\|\s*(?P<done>\d{1,18})/(?P<all>\d{1,18}) \[[^\]]*\]?")
_MOST_BARS = 8


@dataclass(slots=True)
class _Form:
    """Rows of one form."""

    collector: Collector
    framework: Framework | None  # that prints it, if only one does
    count: int = 0  # rows that had no step, evaluations left out
    epochs: list[float] = field(default_factory=list)  # of each of these rows
    #: for each of these rows, total → place of every progress bar
    bars: list[dict[int, int]] = field(default_factory=list)


class PrintedRows:
    """Collects rows of any form; `finish` passes on those of the form with most metrics."""

    def __init__(self, reading: LogReading) -> None:
        self._reading = reading
        self._forms: dict[str, _Form] = {}
        self._bars: dict[int, int] = {}
        self.wants = reading.collector.keeps

    @property
    def num_rows(self) -> int:
        """Of the form with most."""
        return max((form.collector.num_rows for form in self._forms.values()), default=0)

    @property
    def last_step(self) -> int | None:
        """Of the form with most rows."""
        each = [form.collector for form in self._forms.values()]
        return max(each, key=lambda one: one.num_rows).last_step if each else None

    def progress(self, text: str) -> bool:
        """Record the position of the trainer's progress bars; True if the last one is full."""
        is_full, end = False, 0
        for bar in _BAR.finditer(text):
            what, end = text[end : bar.start()].strip(), bar.end()
            if (not what or "train" in what.lower()) and len(self._bars) < _MOST_BARS:
                self._bars[int(bar["all"])] = int(bar["done"])
                is_full = bar["all"] == bar["done"]
        return is_full

    def add_dictionary(self, row: Row, step: int | None = None) -> bool:
        """Take a printed dictionary if it is a trainer's.

        Args:
            step: from the line above it.
        """
        # `train_runtime` is in the summary of the whole run.
        if len(row) < 2 or "train_runtime" in row:
            return False
        if "loss" not in row and any(name.startswith("eval_") for name in row):
            # Some trainers put the prefix before some of the names only.
            is_named = {name: name in _OF_ANY_ROW or name.startswith("eval_") for name in row}
            row = {name if is_named[name] else f"eval_{name}": value for name, value in row.items()}
        names = row.keys() - _SETTINGS
        if step is not None and any(map(self.wants, names)):
            return self.add_numbered("numbered dictionary", {**row, "step": step}, None)
        if names.isdisjoint(_TRAINER_KEYS) or not any(
            self.wants(name) or name.startswith("eval_") for name in names
        ):
            return False
        step_key = next((key for key in STEP_KEYS if key in row), "")
        return self.add(f"dictionary {step_key}", row)

    def add_numbered(self, kind: str, row: Row, framework: Framework | None) -> bool:
        """Take a row that has a step."""
        return self._form(kind, framework).collector.add(row)

    def add(self, kind: str, row: Row) -> bool:
        """Take a row; without a step it is counted."""
        form = self._form(kind, None)
        if not any(key in row for key in STEP_KEYS):
            if not all(name.startswith("eval_") or name == "epoch" for name in row):
                form.count += 1
                epoch = row.get("epoch")
                before = form.epochs[-1] if form.epochs else 0.0
                form.epochs.append(before if epoch is None else float(epoch))
                form.bars.append(dict(self._bars))
            row = {**row, "step": form.count}
        return form.collector.add(row)

    def _form(self, kind: str, framework: Framework | None) -> _Form:
        if kind not in self._forms:
            self._forms[kind] = _Form(Collector(self.wants), framework)
        return self._forms[kind]

    def finish(self) -> None:
        """Hand over the rows of one form, unless rows of JSON hold more."""
        held = [form for form in self._forms.values() if form.collector.num_known]
        if not held:
            return
        sizes = [(one.framework is not None, one.collector.num_known, one.collector.num_rows) for one in held]
        best = held[sizes.index(max(sizes))]
        json, known = self._reading.collector.num_known, best.collector.num_known
        if json > (2 * known if best.framework else 0) and json >= known:
            return
        self._reading.collector = best.collector
        self._reading.hint = best.framework or self._reading.hint
        if best.count:
            self._number(best)

    def _number(self, form: _Form) -> None:
        """Give counted rows the steps of the progress bar next to them, or those that their epochs imply."""
        notes = self._reading.notes
        # A bar is above its row, or below it; then the first row has none above, or one at 0.
        for bars in (form.bars, [*form.bars[1:], self._bars]):
            totals = [total for total in bars[0] if _counts(total, bars)]
            if totals:
                form.collector.renumber([0, *(bar[max(totals)] for bar in bars)])
                notes.append("the printed lines have no step: it is taken from the progress bar")
                return
        notes.append("the printed lines have no step: they are counted from 1")
        epochs = form.epochs
        back = [place for place in range(1, len(epochs)) if epochs[place] < epochs[place - 1]]
        if not back:
            return
        if all(epochs[place] in epochs[:place] for place in back):
            form.collector.renumber([0, *_counted_again(epochs)])
            return
        order = sorted(range(len(epochs)), key=epochs.__getitem__)
        rank = {place: number for number, place in enumerate(order, 1)}
        form.collector.renumber([0, *(rank[place] for place in range(len(epochs)))])


def _counts(total: int, bars: list[dict[int, int]]) -> bool:
    """Whether the bar with this total moves on with every row, from above 0."""
    places = [bar.get(total, 0) for bar in bars]
    return all(places) and all(a != b for a, b in pairwise(places))


def _counted_again(epochs: list[float]) -> list[int]:
    """Steps of rows whose epoch fell back to one that was logged before: the run was restarted."""
    steps: list[int] = []
    passed: list[float] = []
    for epoch in epochs:
        if passed and epoch < passed[-1]:
            del passed[bisect_left(passed, epoch) :]
        passed.append(epoch)
        steps.append(len(passed))
    return steps
