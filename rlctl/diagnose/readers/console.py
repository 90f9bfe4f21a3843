"""Console output: finds the rows that frameworks print among other lines, also in pasted text.

A row may be one line of a known form, a printed dictionary (on one line or several), a table, or a list of
`name: value` lines. The rows of each form are kept separate until the end (`PrintedRows`), because a log also
contains the output of graders, agents and models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rlctl.diagnose.readers.printed_blocks import (
    BARS,
    BULLETS,
    NUMBER,
    PLAIN,
    Braces,
    Listing,
    PrintedTable,
    pairs,
    printed_number,
)
from rlctl.diagnose.readers.printed_content import (
    FirstError,
    PrintedRows,
    Row,
    keep_settings,
    keep_warning,
)
from rlctl.diagnose.readers.reader_files import UNKNOWN, RowForm
from rlctl.diagnose.readers.reading import LogReading
from rlctl.diagnose.table import Framework
from rlctl.digits import whole_number

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
#: Colour codes without the escape character, which pasting often removes.
_LOST_COLOUR = re.compile(r"\ufffd?\[(?:0|1|3\d|9\d|[01];\d+|\d+;\d+)?m")
_STRAIGHT_QUOTES = str.maketrans("‘’“”", "''\"\"")
_QUOTE = re.compile(r"\s*>(?:\s?>)*\s?")
#: What another process prints into a row, up to the end of the line.
_OTHER_PROCESS = re.compile(
    r"\((?:\w+ )?pid=\d+|\[rank\d+\]:|(?<![\s|>\]'\":-])\d{4}-\d\d-\d\d \d\d:\d\d"
    r"|(?<![\s|>\]-])(?:INFO|WARNING|ERROR|DEBUG)(?: \d\d-\d\d|:\w+:)"
)
_FENCE = re.compile(r"\s*(?:```|~~~)")
_RAY = re.compile(r"\([^()]*\bpid=\d+[^()]*\)\s?")
_DICTIONARY = re.compile(r"\{\s*['\"][^{}]*\}")
_BARE_PAIRS = re.compile(r"['\"][\w/().-]+['\"]:\s")
_FEWEST_PAIRS = 3
_MOST_PROCESSES = 100
#: Longer lines are not searched for tables, lists, settings, rows of unknown form and starts of dictionaries.
_LONGEST = 10_000
_CELL = re.compile(
    rf"(?P<name>[A-Za-z][\w .()/@-]*?)\s*(?::|=|\s)\s*(?P<number>{NUMBER})(?P<percent>%?)(?!\S*/)",
    re.IGNORECASE,
)
_VERL_CELL = re.compile(r"[^\s:]+(?::[^\s:]+)+")
_NEXT_IS_STEP = re.compile(
    r"(?:^|\s)(?:global[ _])?(?:step|iteration)\s*[:#=]?\s*(\d+)\s*:?\s*$", re.IGNORECASE
)


def _verl_cells(text: str) -> Row:
    row: Row = {}
    for cell in text.split(" - "):
        name, _, value = cell.rpartition(":")
        if name and (number := printed_number(value)) is not None:
            row[name] = number
    return row


def _continues_verl(before: str, text: str) -> bool:
    """Whether a line is the rest of a row that a terminal wrapped at any position."""
    first, *rest = text.strip().strip("-").strip().split(" - ")
    if rest:
        return " " not in first and all(map(_VERL_CELL.fullmatch, rest))
    last_name, _, last_value = before.rpartition(" - ")[2].partition(":")
    is_cell = _VERL_CELL.fullmatch(first) is not None
    is_tail = is_cell or first.startswith(":") or before.endswith(":")
    return (is_cell and "/" in first) or (not last_value and bool(last_name) and is_tail)


def _piped_cells(text: str) -> Row:
    row: Row = {}
    for cell in map(str.strip, text.split("|")):
        match = _CELL.fullmatch(cell) or _CELL.match(cell)
        if match:
            row.setdefault(match["name"].strip(), printed_number(match["number"] + match["percent"]))
    return row


def _listed_cells(text: str) -> Row:
    """`name=value`, `name: value` or `name value`, with commas, pipes or spaces between."""
    cells = re.finditer(rf"([A-Za-z_][\w/.-]*)\s*[:=]\s*({NUMBER}%?)(?=[\s,;|)\]]|$)", text)
    return {cell[1]: printed_number(cell[2]) for cell in cells}


#: Form of the figures in a line (see `RowForm.figures`) → their reader.
_IN_LINE: Mapping[str, Callable[[str], Row]] = {
    "dictionary": pairs,
    "dashes": _verl_cells,
    "bars": _piped_cells,
    "pairs": _listed_cells,
}
#: Form of the figures below a line → style of the list.
_BELOW = {"bullets": BULLETS, "table": BARS, "list": PLAIN}


def _step_of(match: re.Match[str]) -> int | None:
    return whole_number(match.groupdict().get("step") or "")


class ConsoleReader:
    """Converts printed lines to rows; `finish` adds the rows to the reading."""

    def __init__(self, reading: LogReading) -> None:
        self._reading = reading
        self._forms = reading.readers.forms
        self._rows = PrintedRows(reading)
        self._exception = FirstError()
        self._line = 0
        # A row that the next line may continue: its form, text, and the match of the form's pattern.
        self._wrapped: tuple[Framework, RowForm, str, re.Match[str] | None] | None = None
        self._braces: dict[str, Braces] = {}  # by the process prefix of the line
        self._listing = Listing()
        self._table: PrintedTable | None = None
        self._heading: tuple[Framework, str, int] | None = None
        self._next_step: int | None = None  # as the line before states, for the lines below it
        self._list_step: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether a preview has read enough rows."""
        return self._reading.limit is not None and self._rows.num_rows >= self._reading.limit

    def add(self, row: Row, step: int | None = None) -> bool:
        """Adds a row from a printed dictionary, or from a JSON line without a step."""
        return self._rows.add_dictionary(row, step)

    def pass_row(self, has_restarted: bool) -> None:
        """Discards the errors found so far, because a row follows them; its step may go back."""
        self._exception.clear(has_restarted)

    def read(self, line: bytes, number: int = 0) -> bool:
        """Reads one line; False if it contains no row."""
        self._line = number
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if not text.isascii():
            text = text.translate(_STRAIGHT_QUOTES)
        if "\x1b" in text:
            text = _COLOUR.sub("", text)
        if "[" in text and ("m(" in text or "[0m" in text or "[3" in text):
            text = _LOST_COLOUR.sub("", text)
        # A progress bar returns to the start of its line without ending it.
        found = [self._part(part) for part in text.split("\r") if part] if text else [self._blank()]
        if any(found):
            self.pass_row(self._rows.has_restarted)
            return True
        return False

    def finish(self) -> None:
        """Passes the rows and the first error to the reading."""
        self._end_wrapped()
        self._end_listing()
        for braces in self._braces.values():
            self.add(braces.cut_off(), braces.step)
        self._rows.finish()
        self._reading.exception = self._exception.at_end(self._line)

    def _blank(self) -> bool:
        self._table = None
        return self._end_listing()

    def _part(self, text: str) -> bool:
        if ">" in text and (quote := _QUOTE.match(text)):
            text = text[quote.end() :]
        prefix = match.group() if text[:1] == "(" and (match := _RAY.match(text)) else ""
        text = text[len(prefix) :]
        if not text.strip():
            return self._blank()
        other = _OTHER_PROCESS.search(text, 1)
        if other:
            head = text[: other.start()]
            if self._wrapped or prefix in self._braces or self._may_be_row(head):
                text = head
        wrapped = self._take_wrapped(text)
        if wrapped is not None:
            return wrapped
        if prefix in self._braces:
            return self._take_braces(prefix, text)
        return self._form(text) or self._other(prefix, text)

    # --- rows of one line ------------------------------------------------------------------------

    def _form(self, text: str) -> bool:
        for framework, form in self._forms:
            if form.contains not in text or (framework == UNKNOWN and len(text) > _LONGEST):
                continue
            match = form.line.search(text)
            if not match:
                continue
            step = _step_of(match)
            if form.figures in _BELOW and step is not None:
                self._end_listing()
                self._heading = framework, _BELOW[form.figures], step
                return False
            if form.figures == "dashes" and step is not None and "/" in match["body"]:
                self._wrapped = framework, form, text, match
                self._rows.advance("step", step)
                return True
            if self._row(framework, form, match):
                return True
        return False

    def _row(self, framework: Framework, form: RowForm, match: re.Match[str]) -> bool:
        row = _IN_LINE[form.figures](match["body"] or "")
        if form.at_least:
            wanted = sum(map(self._rows.wants, row))
            if wanted < form.at_least or (framework == UNKNOWN and 2 * wanted <= len(row)):
                return False
        elif not any("/" in name for name in row):
            return False
        clock = form.clocks.get(match["clock"], form.clocks["*"]) if form.clocks else "step"
        step = _step_of(match)
        if step is not None:
            row[clock] = step
        return self._rows.add(framework, row, None if framework == UNKNOWN else framework)

    def _take_wrapped(self, text: str) -> bool | None:
        """Joins a row between dashes with the line that continues it; None if the line does not."""
        if self._wrapped is None:
            return None
        framework, form, before, _ = self._wrapped
        if form.contains not in text and _continues_verl(before, text):
            lost_space = text.startswith("- ") or before.endswith(" -")
            joined = before + " " * (lost_space and not text.startswith(" ")) + text
            self._wrapped = framework, form, joined, None
            return True
        self._end_wrapped()
        return None

    def _end_wrapped(self) -> None:
        if self._wrapped is not None:
            framework, form, text, match = self._wrapped
            self._wrapped = None
            if match or (match := form.line.search(text)):
                self._row(framework, form, match)

    # --- dictionaries ----------------------------------------------------------------------------

    def _other(self, prefix: str, text: str) -> bool:
        """Reads progress bars, dictionaries, tables and lists; otherwise settings, headings, exceptions."""
        if "%|" in text and self._bar(text):
            return True
        step = self._next_step
        self._next_step = None
        may_be_dictionary = "{" in text or text.lstrip()[:1] in "'\""
        if may_be_dictionary and (found := self._dictionaries(prefix, text, step)) is not None:
            return found
        if len(text) > _LONGEST:
            return self._end_listing()
        if self._take_table(text):
            return True
        if self._listing.is_other(text):
            self._end_listing()
        if self._listing.is_empty:
            self._list_step = step
        entry = self._listing.take(text)
        if entry:
            has_metric = any(map(self._rows.wants, entry))
            if not has_metric:
                self._settings(text)
            return has_metric
        has_ended = self._end_listing()
        if not _FENCE.match(text):
            self._remark(text)
        return has_ended

    def _bar(self, text: str) -> bool:
        """Records the position of a progress bar; figures next to a full bar are a row."""
        is_full = self._rows.progress(text)
        row = _listed_cells(text.rpartition("[")[2]) if is_full and "=" in text else {}
        return sum(map(self._rows.wants, row)) > 1 and self._rows.add("progress bar", row)

    def _remark(self, text: str) -> None:
        """Reads a step, settings or an error from a line without a row."""
        if "te" in text and text.rstrip()[-1:] in ":0123456789" and (match := _NEXT_IS_STEP.search(text)):
            self._next_step = whole_number(match[1])
        self._settings(text)
        keep_warning(text, self._line, self._reading.warnings)
        self._exception.take(text, self._line)

    def _settings(self, text: str) -> None:
        """Reads settings before the first row; later lines of this form may be what the model wrote."""
        if not self._rows.num_rows:
            keep_settings(text, self._reading.readers.setting_names, self._reading.stated)

    def _dictionaries(self, prefix: str, text: str, step: int | None) -> bool | None:
        """Reads the dictionaries of a line, or begins one; True if one is a row, None if there is none."""
        added = []
        start = text.find("{")
        may_begin = len(self._braces) < _MOST_PROCESSES
        while start >= 0:
            match = _DICTIONARY.match(text, start)
            if match:
                added.append(self.add(pairs(match.group()), step))
                start = match.end()
            elif may_begin and len(text) - start <= _LONGEST and (braces := Braces.begin(text[start:], step)):
                self._braces[prefix] = braces
                return any(added)
            start = text.find("{", start + 1)
        if not added and "{" not in text and len(_BARE_PAIRS.findall(text)) >= _FEWEST_PAIRS:
            added = [self.add(pairs(text), step)]
        return any(added) if added else None

    def _take_braces(self, prefix: str, text: str) -> bool:
        """Continues a dictionary of several lines."""
        braces = self._braces[prefix]
        state = braces.take(text)
        if state == "open":
            return False
        if state == "not its own" and braces.may_go_on and not self._may_be_row(text):
            self._remark(text)  # of another process
            return False
        del self._braces[prefix]
        if state == "not its own":
            found = self.add(braces.cut_off(), braces.step)
            return (self._form(text) or self._other(prefix, text)) or found
        if self.add(pairs(braces.text), braces.step):
            return True
        self._reading.config |= braces.value()
        return False

    def _may_be_row(self, text: str) -> bool:
        return "{" in text or any(form.contains in text and form.line.search(text) for _, form in self._forms)

    # --- tables and lists ------------------------------------------------------------------------

    def _take_table(self, text: str) -> bool:
        if self._table:
            rows = self._table.take(text)
            if rows is not None:
                return sum(self._rows.add("table", row) for row in rows) > 0
            self._table = None
        self._table = PrintedTable.begin(text, self._rows.wants, self._reading.collector.step_keys)
        return False

    def _end_listing(self) -> bool:
        if self._listing.is_empty:
            return False
        style, row = self._listing.end()
        wanted = sum(map(self._rows.wants, row))
        if wanted and self._heading and self._heading[1] == style:
            kind, _, step = self._heading
            return self._rows.add(kind, {**row, "step": step}, kind)
        if self._list_step is not None and not row.keys() & set(self._reading.collector.step_keys):
            row["step"] = self._list_step
        return wanted > 1 and self._rows.add("list", row)
