"""Reads a JSON document element by element, so that it need not fit into memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from rlctl.data.blocks import MAX_LINE_BYTES
from rlctl.data.text_files import CONTAINERS
from rlctl.errors import UsageError

READ_BYTES = 1 << 20
BLANK = " \t\r\n"


def document_rows(path: Path, file: BufferedReader, max_rows: int) -> Iterator[list[Any]]:
    """Yields the rows of a document: elements of an array or of an object's only list, or the object itself.

    A list has at most `max_rows` rows, or the rows of about `READ_BYTES`.

    Raises:
        UsageError: the document is not JSON or not UTF-8, an element is longer than `MAX_LINE_BYTES`, or an
            object contains several lists of rows, or columns instead of rows.
    """
    text = _Text(path, file)
    is_object = text.peek() == "{"
    yield from _object_rows(path, text, max_rows) if is_object else _elements(text, max_rows)
    if text.peek():
        raise text.wrong("more text follows the value", text.at)


def _object_rows(path: Path, text: _Text, max_rows: int) -> Iterator[list[Any]]:
    row: dict[str, Any] = {}
    container = ""
    text.expect("{")
    follows = "," if text.peek() != "}" else text.expect("}")
    while follows == ",":
        if text.peek() != '"':
            raise text.wrong("expecting a name in double quotes", text.at)
        name = text.element()
        text.expect(":")
        if name.lower() in CONTAINERS and text.begins_rows():
            if container:
                raise _several(path, [container, name])
            container = name
            yield from _elements(text, max_rows)
        else:
            row[name] = text.element()
        follows = text.expect(",}")
    if not container:
        yield _rows_in(path, row)


def _rows_in(path: Path, row: dict[str, Any]) -> list[Any]:
    """Returns the rows in an object without a known container key."""
    values = list(row.values())
    # A list of messages is a value of one row.
    begins = {name: value[0] for name, value in row.items() if isinstance(value, list) and value}
    lists = [name for name, first in begins.items() if isinstance(first, dict) and "role" not in first]
    if len(row) == 1 and lists:
        return list(values[0])
    if len(row) == 1 and isinstance(values[0], dict):
        return _rows_in(path, values[0])
    if row and len(lists) == len(row):
        raise _several(path, lists)
    if len(row) > 1 and _are_columns(values):
        fix = "write a list of rows, in pandas `to_json(path, orient='records')`"
        raise UsageError("the object holds columns, not rows", where=str(path), fix=fix)
    return [row]


def _are_columns(values: list[Any]) -> bool:
    """Whether these are lists of one length, or objects with the same keys, and the first holds scalars."""
    first, kind = values[0], type(values[0])
    if kind not in (dict, list) or not all(isinstance(value, kind) and value for value in values):
        return False
    same = all((list(v) == list(first)) if kind is dict else (len(v) == len(first)) for v in values)
    inner = first.values() if kind is dict else first
    return same and not any(isinstance(item, dict | list) for item in inner)


def _several(path: Path, names: list[str]) -> UsageError:
    what = f"the object holds several lists of rows: {', '.join(names)}"
    return UsageError(what, where=str(path), fix="write each list to a separate file")


def _elements(text: _Text, max_rows: int) -> Iterator[list[Any]]:
    text.expect("[")
    follows = "," if text.peek() != "]" else text.expect("]")
    elements: list[Any] = []
    reads = text.reads
    while follows == ",":
        elements.append(text.element())
        follows = text.expect(",]")
        if len(elements) == max_rows or text.reads > reads or follows == "]":
            yield elements
            elements, reads = [], text.reads


class _Text:
    """Parser with a sliding window over the file's text."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self._path = path
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._parse = json.JSONDecoder().raw_decode
        self._window = ""
        self._lines_before = 0
        self.at = 0  # position in the window
        self.reads = 0  # number of times that the window was extended

    def peek(self) -> str:
        """Returns the next character that is not blank; "" at the end of the file."""
        while True:
            rest = self._window[self.at : self.at + 1]
            if rest and rest not in BLANK:
                return rest
            if rest:
                self.at += 1
            elif not self._more(READ_BYTES):
                return ""

    def begins_rows(self) -> bool:
        """Whether a list of objects comes next; consumes nothing."""
        if self.peek() != "[":
            return False
        place = self.at + 1
        while True:
            rest = self._window[place:].lstrip(BLANK)
            if rest or not self._more(READ_BYTES):
                return rest.startswith("{")
            place = self.at + 1  # the window has moved

    def expect(self, characters: str) -> str:
        """Consumes and returns the next character, which must be one of these."""
        found = self.peek()
        if not found or found not in characters:
            raise self.wrong(f"expecting {' or '.join(map(repr, characters))}", self.at)
        self.at += 1
        return found

    def element(self) -> Any:
        """Parses and returns the next value."""
        self.peek()
        while True:
            try:
                value, end = self._parse(self._window, self.at)
            except RecursionError:
                raise self.wrong("nested too deeply", self.at) from None
            except ValueError as error:  # invalid, or incomplete: more text decides
                held = len(self._window) - self.at
                if held > MAX_LINE_BYTES or not self._more(max(READ_BYTES, held)):
                    at = error.pos if isinstance(error, json.JSONDecodeError) else self.at
                    raise self.wrong(getattr(error, "msg", str(error)), at) from None
            else:
                # A number at the end of the window may be incomplete: 1, 1.5, 1e+9.
                if len(self._window) - end > len("e+") or not self._more(READ_BYTES):
                    self.at = end
                    return value

    def wrong(self, what: str, at: int) -> UsageError:
        """Returns the error at a position of the window."""
        return UsageError(f"invalid JSON: {what}", where=f"{self._path}:{self._line(at)}")

    def _line(self, at: int) -> int:
        return self._lines_before + self._window.count("\n", 0, at) + 1

    def _more(self, size: int) -> bool:
        data = self._file.read(size)
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line = self._line(len(self._window)) + error.object[: error.start].count(b"\n")
            raise UsageError("not valid UTF-8", where=f"{self._path}:{line}") from None
        if not data:
            return False
        self._lines_before += self._window.count("\n", 0, self.at)
        self._window = self._window[self.at :] + text
        self.at = 0
        self.reads += 1
        return True
