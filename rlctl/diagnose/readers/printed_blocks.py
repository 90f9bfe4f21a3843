"""Printed numbers, and rows printed over several lines: dictionaries, tables, and lists of `name: value`."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Collection
from typing import Any, Literal

from rlctl.diagnose.readers.printed_content import Row
from rlctl.digits import whole_number

#: Regular expression of a number as text.
NUMBER = (
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?)\b"
)
#: A number as Python prints it: bare, quoted, or inside `np.float64(…)` and `tensor(…, device=…)`.
_VALUE = (
    rf"(?:(?:\w{{1,20}}\.){{0,3}}\w{{1,20}}\(|['\"])?"
    rf"(?P<number>{NUMBER}|True|False)(?=['\"),\s}}\]%]|$)"
)
_WHOLE_VALUE = re.compile(_VALUE + r"(?P<percent>%?)", re.IGNORECASE)
_PAIR = re.compile(rf"['\"](?P<name>[^'\"{{}}]{{1,200}})['\"]:\s*{_VALUE}(?!%)", re.IGNORECASE)
#: A step with the total number of steps, as text: `'step': '5/547'`.
_OF_ALL = re.compile(r"['\"](?P<name>\w*step[\w/]*)['\"]:\s*['\"](?P<number>\d+)/\d+['\"]")


def printed_number(text: str) -> float | None:
    """The number that a program printed, a percentage as a share; None for any other text."""
    try:
        return float(text)  # the usual case, and many times faster than a regular expression
    except ValueError:
        match = _WHOLE_VALUE.match(text)
        return None if match is None else _plain(match["number"]) * (0.01 if match["percent"] else 1)


def pairs(text: str) -> dict[str, float | None]:
    """The numbers of a printed dictionary by name."""
    figures: dict[str, float | None] = {pair["name"]: _plain(pair["number"]) for pair in _PAIR.finditer(text)}
    if "step" in text:
        figures |= {pair["name"]: float(pair["number"]) for pair in _OF_ALL.finditer(text)}
    return figures


def _plain(number: str) -> float:
    known = {"true": 1.0, "false": 0.0}.get(number.lower())
    return float(number.replace(",", "")) if known is None else known


# --- dictionaries of several lines -------------------------------------------------------------------

_OPENING = re.compile(r"\s*(?:\{\s*['\"][^'\"]+['\"]\s*:|\{\s*$)")
_CONTINUES = re.compile(r"[\s'\"}]|[\w/.()-]+['\"]: |[\d.e+-]+['\"]?[,}]")
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_MOST_LINES, _MOST_OTHERS = 20_000, 5


class Braces:
    """A dictionary printed over several lines, by `pprint` or by a terminal that wraps."""

    def __init__(self, text: str, depth: int, step: int | None) -> None:
        self.step = step  # as the line above it states, if any
        self._lines = [text]
        self._depth = depth
        self._num_others = 0

    @classmethod
    def begin(cls, text: str, step: int | None) -> Braces | None:
        """Begins a dictionary if the text opens one and does not close it; otherwise returns None."""
        if not _OPENING.match(text) or (depth := _depth(text)) <= 0:
            return None
        return cls(text, depth, step)

    @property
    def text(self) -> str:
        """The joined text of all lines; a line may break within a name."""
        return "\n".join(self._lines) if self._lines[-1][:1] in " }" else "".join(self._lines)

    def take(self, text: str) -> Literal["open", "closed", "not its own"]:
        """Adds the next line if it continues the dictionary."""
        if not _CONTINUES.match(text) or len(self._lines) > _MOST_LINES:
            self._num_others += 1
            return "not its own"
        self._lines.append(text)
        self._depth += _depth(text)
        return "open" if self._depth > 0 else "closed"

    @property
    def may_go_on(self) -> bool:
        """Whether few other lines are between its lines: another process may print there."""
        return self._num_others <= _MOST_OTHERS

    def cut_off(self) -> Row:
        """The complete pairs of a dictionary that was cut off; without the last, which may be incomplete."""
        text = self.text.rstrip()
        return pairs(text[: text.rfind(",") + 1])

    def value(self) -> dict[str, Any]:
        """The dictionary as a configuration; empty if it is not a Python literal."""
        try:
            with warnings.catch_warnings(action="ignore"):
                value = ast.literal_eval("\n".join(self._lines))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def _depth(text: str) -> int:
    bare = _STRING.sub("", text)
    return sum(map(bare.count, "{[(")) - sum(map(bare.count, "}])"))


# --- tables ------------------------------------------------------------------------------------------

#: Column name in a notebook's table → name in rows.
_COLUMNS = {"Step": "step", "Training Loss": "loss", "Validation Loss": "eval_loss", "Epoch": "epoch"}
_TO_BARS = str.maketrans("│┃║", "|||")
_NOT_LOGGED = frozenset({"", "-", "—", "No Log", "None", "null", "N/A", "n/a"})
_STEP_COLUMN = re.compile(r"(?:global[ _])?step\s*[:#=]?\s*(\d+)", re.IGNORECASE)


class PrintedTable:
    """A table with a header line, separated by pipes, tabs or several spaces.

    Each row is a step, or each column is a step and each row a metric.
    """

    def __init__(self, delimiter: str | None, names: list[str]) -> None:
        self._delimiter = delimiter
        self._names = names
        found = [_STEP_COLUMN.fullmatch(name) for name in names[1:]]
        steps = [whole_number(match[1]) for match in found if match]
        are_steps = all(found) and None not in steps
        self._steps = [step for step in steps if step is not None] if are_steps else []

    @classmethod
    def begin(
        cls, text: str, wants: Callable[[str], bool], step_keys: Collection[str]
    ) -> PrintedTable | None:
        """Begins a table if the line is a header with metrics or steps; otherwise returns None."""
        delimiter: str | None = None
        if _has_bars(text):
            delimiter = "|"
        elif "\t" in text:
            delimiter = "\t"
        elif not ("  " in text and ("step" in text.lower() or "loss" in text)):
            return None
        names = _cells(text, delimiter)
        if len(names) < 2 or any(printed_number(name) is not None for name in names):
            return None
        table = cls(delimiter, names)
        wanted = sum(map(wants, names))
        has_step = any(name in step_keys for name in names)
        return table if table._steps or (wanted and (has_step or wanted > 1)) else None

    def take(self, text: str) -> list[Row] | None:
        """Returns the rows of a line; None if the table has ended."""
        if _is_border(text):
            return []
        cells = _cells(text, self._delimiter)
        if self._steps:
            numbers = [printed_number(cell) for cell in cells[1:]]
            if len(cells) != len(self._names) or printed_number(cells[0]) is not None:
                return None
            found = zip(self._steps, numbers, strict=True)
            return [{"step": step, cells[0]: number} for step, number in found if number is not None]
        if len(cells) == len(self._names) + 1:  # the index that pandas prints
            cells = cells[1:]
        if len(cells) != len(self._names):
            return None
        row: Row = {
            name: number
            for name, cell in zip(self._names, cells, strict=True)
            if cell not in _NOT_LOGGED and (number := printed_number(cell)) is not None
        }
        return [row] if row else None


def _has_bars(text: str) -> bool:
    return "|" in text or "│" in text or "┃" in text or "║" in text


def _cells(text: str, delimiter: str | None) -> list[str]:
    if delimiter is None and "  " not in text.strip():
        return text.split()
    if delimiter is None:
        return [column_name(cell) for cell in re.split(r"\s{2,}", text.strip())]
    if delimiter == "|":
        text = text.translate(_TO_BARS).strip().removeprefix("|").removesuffix("|")
    return [column_name(cell) for cell in text.split(delimiter)]


def _is_border(text: str) -> bool:
    return not any(map(str.isalnum, text))


def column_name(cell: str) -> str:
    """The name of a metric in rows, for a cell of a table's header."""
    cell = re.sub(r"\s*/\s*", "/", cell.strip().strip("*`").strip())
    return _COLUMNS.get(cell, cell)


# --- lists -------------------------------------------------------------------------------------------

_ENTRY_NAME = re.compile(r"[A-Za-z][\w .@/()-]{0,100}")
_LONGEST_NUMBER = 40
_SECTION = re.compile(r"\W*(Validation) Results:?\s*$")


#: Styles of a list: how its entries are marked.
BULLETS, BARS, PLAIN = "bullets", "bars", "plain"


class Listing:
    """Consecutive lines of one name and one value each, or of several pairs between bars."""

    def __init__(self) -> None:
        self._row: Row = {}
        self._style = PLAIN
        self._section = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is no entry since the last call of `end`."""
        return not self._row

    def is_other(self, text: str) -> bool:
        """Whether the line has another style than the entries before it."""
        return _style(text) != self._style

    def take(self, text: str) -> Row:
        """Adds and returns the entries of a line; empty if it has none."""
        row: Row = {}
        if _has_bars(text):
            cells = _cells(text, "|")
            values = [printed_number(cell) for cell in cells[1::2]]
            has_numbers = any(printed_number(name) is not None for name in cells[::2])
            if len(cells) == 2 * len(values) and None not in values and not has_numbers:
                row = dict(zip(cells[::2], values, strict=True))
        elif text.rstrip()[-1:] in "0123456789%,nfs" and (entry := _entry(text)):
            row = {self._section + entry[0]: entry[1]}
        elif "Results" in text and (section := _SECTION.match(text)):
            self._section = f"{section[1].lower()}/"
        if not row and self._row and _is_border(text):
            return {"": None}
        if row:
            self._style = _style(text)
        self._row |= row
        return row

    def end(self) -> tuple[str, Row]:
        """Ends the list; returns its style and all entries since the last end."""
        row = self._row
        self._row = {}
        self._section = ""
        return self._style, row


def _entry(text: str) -> tuple[str, float] | None:
    """Name and value of `name: value`, `name = value` or `name value`, also bulleted or quoted; else None."""
    text = text.strip().removeprefix("wandb:").rstrip(",").removesuffix(" tokens").removesuffix(" nats")
    at = max(text.rfind(mark) for mark in " \t:=")
    name = text[:at].strip(" \t:=•*·-'\"`")
    last = text[at + 1 :]
    if at < 1 or len(last) > _LONGEST_NUMBER or not _ENTRY_NAME.fullmatch(name):
        return None
    number = printed_number(last)
    return None if number is None else (name, number)


def _style(text: str) -> str:
    if _has_bars(text) or _is_border(text):
        return BARS
    return BULLETS if text.lstrip().startswith("•") else PLAIN
