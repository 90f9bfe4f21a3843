"""Text logs: JSON lines and console output, whole JSON documents, and tables with a step column (CSV)."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import IO, Any

import numpy as np
from pydantic_core import from_json

from rlctl.diagnose.readers.collect import as_number
from rlctl.diagnose.readers.console import ConsoleReader
from rlctl.diagnose.readers.printed_blocks import column_name
from rlctl.diagnose.readers.reading import LogReading
from rlctl.digits import whole_number

_LONGEST_LINE = 1 << 26
_VERL_KEYS = {"step", "data"}
_DELIMITERS = ",;\t"
_RUN_SEPARATOR = " - "  # W&B's export: "run name - metric", with __MIN and __MAX columns


def read_lines(stream: IO[bytes], reading: LogReading) -> None:
    """Reads one JSON object per line, or rows that a framework prints; skips other lines."""
    collector = reading.collector
    console = ConsoleReader(reading)
    num_objects = num_others = num_with_nul = number = 0
    lines = iter(partial(stream.readline, _LONGEST_LINE), b"")
    first = next(lines, b"").removeprefix(codecs.BOM_UTF8).removeprefix(codecs.BOM_UTF16_LE)
    for number, logged in enumerate(chain((first,), lines), 1):
        line = logged.replace(b"\0", b"")
        num_with_nul += line != logged
        row = _object(line) if line[:1] == b"{" else None
        if row is None:
            has_row = console.read(line, number)
        else:
            if row.keys() == _VERL_KEYS and not num_objects:  # verl's file logger
                reading.hint = "verl"
                collector.null_is_nan = True
            before = collector.last_step
            is_object = collector.add(row)
            num_objects += is_object
            has_row = is_object or console.add(row)
            if has_row and num_others:
                console.pass_row(is_object and collector.last_step < before)
        num_others += not has_row and bool(line.strip())
        if has_row and (reading.is_full or console.is_full):
            break
    if num_with_nul:
        reading.notes.append(f"{num_with_nul} line(s) contain NUL bytes, which are left out")
    if num_others and num_objects:  # between printed rows other lines are normal
        reading.notes.append(f"{num_others} unreadable line(s) skipped")
    console.finish()


def _object(line: bytes) -> dict[str, Any] | None:
    """Parses a JSON object; None for anything else."""
    try:  # a text in the row may contain bytes that are not UTF-8
        row = from_json(line if line.isascii() else line.decode("utf-8", "replace"), cache_strings="keys")
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def may_be_document(head: bytes) -> bool:
    """Whether the file may be one JSON value, not one per line, judging by its first bytes."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] == b"[":
        return text[1:].lstrip()[:1] == b"{"
    if text[:1] != b"{" or text[1:].lstrip()[:1] != b'"':
        return False
    first, _, rest = text.partition(b"\n")
    if not rest.strip():
        return True
    try:
        from_json(first)
    except ValueError:  # continues on the next line, or is cut
        return not rest.lstrip().startswith(b"{")
    return False


def read_document(stream: IO[bytes], reading: LogReading) -> bool:
    """Reads a JSON document: `trainer_state.json`, a list of rows, or columns; False if it has no history."""
    content = stream.read().removeprefix(codecs.BOM_UTF8)
    is_cut = False
    try:
        document = from_json(content, cache_strings="keys")
    except ValueError:
        try:
            document = from_json(content, cache_strings="keys", allow_partial=True)
            is_cut = True
        except ValueError:
            return False
    if isinstance(document, Mapping):
        lists = [
            value
            for value in document.values()
            if isinstance(value, list) and isinstance(next(iter(value), 0), dict)
        ]
        document = document.get("log_history", lists[0] if len(lists) == 1 else document)
    if is_cut:
        if not isinstance(document, list):
            return False
        document = document[:-1]  # its last number may be cut
        reading.notes.append("the JSON document ends early: the rows before were read")
    if isinstance(document, list):
        return _add_rows(document, reading)
    if not isinstance(document, Mapping):
        return False
    if any(isinstance(document.get(key), list | Mapping) for key in reading.collector.step_keys):
        return _add_rows(_transposed(document, reading.collector.step_keys), reading)
    return _add_by_step(document, reading)


def _add_rows(rows: Iterable[Any], reading: LogReading) -> bool:
    found = [reading.collector.add(row) for row in rows if isinstance(row, dict)]
    return any(found)


def _transposed(columns: Mapping[str, Any], step_keys: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Converts column → list, or column → index → value, to rows."""
    indexed = {
        name: values if isinstance(values, Mapping) else dict(enumerate(values))
        for name, values in columns.items()
        if isinstance(values, list | Mapping)
    }
    step = next(values for key in step_keys if (values := indexed.get(key)) is not None)
    for index in step:
        yield {name: values.get(index) for name, values in indexed.items()}


def _add_by_step(document: Mapping[str, Any], reading: LogReading) -> bool:
    """Adds the values of metric → step → value, with a separate clock for every metric."""
    is_added = False
    for name, values in document.items():
        if not isinstance(values, Mapping) or not values or None in (found := [*map(whole_number, values)]):
            continue
        is_added = True
        steps = np.array(found, dtype=np.int64)
        numbers = np.array([as_number(value) for value in values.values()])
        was_logged = np.array([value is not None for value in values.values()])
        order = np.argsort(steps, kind="stable")
        reading.collector.add_columns(name, steps[order], {name: (numbers[order], was_logged[order])})
    return is_added


def csv_header(head: bytes, step_keys: Collection[str]) -> tuple[list[str], str] | None:
    """(names, delimiter) if the first line has column names with a step; None otherwise."""
    line = head.partition(b"\n")[0].decode("utf-8-sig", "replace").strip("\r")
    delimiter = max(_DELIMITERS, key=line.count)
    if delimiter not in line:
        return None
    try:
        names = [name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])]
    except csv.Error:
        return None
    names = [column_name(name) for name in names]
    return (names, delimiter) if any(name in step_keys for name in names) else None


def read_csv(stream: IO[bytes], names: list[str], delimiter: str, reading: LogReading) -> None:
    """Reads the rows of a table in one pass; empty cells count as not logged."""
    lines = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")
    rows = csv.reader((line.replace("\0", "") for line in lines), delimiter=delimiter)
    next(rows, None)
    columns = _columns_of_one_run(names, reading)
    num_skipped = 0
    try:
        for cells in rows:
            if delimiter == ";":  # as spreadsheets write it where the comma is the decimal mark
                cells[:] = [cell if "." in cell else cell.replace(",", ".") for cell in cells]
            row = {name: cells[place] or None for name, place in columns.items() if place < len(cells)}
            if len(cells) < len(names) or not reading.collector.add(row):
                num_skipped += bool(cells)
            elif reading.is_full:
                break
    except csv.Error as error:
        reading.notes.append(f"reading stopped in line {rows.line_num}: {error}")
    if num_skipped:
        reading.notes.append(f"{num_skipped} row(s) without a step, or cut off, skipped")


def _columns_of_one_run(names: list[str], reading: LogReading) -> dict[str, int]:
    """Column indices by name.

    An export of several runs has a column per run and metric; only the first run is read.
    """
    plain = {name: index for index, name in enumerate(names) if name}
    steps = {name: place for name, place in plain.items() if name in reading.collector.step_keys}
    others = {name: place for name, place in plain.items() if name not in steps}
    if not others or not all(_RUN_SEPARATOR in name for name in others):
        return plain
    runs = {name: name.rpartition(_RUN_SEPARATOR)[0] for name in others}
    first = next(iter(runs.values()))
    if len(set(runs.values())) > 1:
        reading.notes.append(f"{len(set(runs.values()))} runs in one table: {first} was read")
    return steps | {
        name.rpartition(_RUN_SEPARATOR)[2]: place
        for name, place in others.items()
        if runs[name] == first and not name.endswith(("__MIN", "__MAX"))
    }
