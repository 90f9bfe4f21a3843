"""A JSON array read element by element, so that its size does not matter."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from rlctl.data.blocks import MAX_LINE_BYTES
from rlctl.errors import UsageError

READ_BYTES = 1 << 20
BLANK = " \t\r\n"


def array_elements(path: Path, file: BufferedReader, max_rows: int) -> Iterator[list[Any]]:
    """The elements of the array in `file`: at most `max_rows`, or what about `READ_BYTES` hold, at a time.

    Raises:
        UsageError: it is no JSON array, not UTF-8, or an element is longer than `MAX_LINE_BYTES`.
    """
    text = _Text(path, file)
    text.expect("[")
    if text.peek() == "]":
        return
    elements: list[Any] = []
    reads, follows = text.reads, ","
    while follows == ",":
        elements.append(text.element())
        follows = text.expect(",]")
        if len(elements) == max_rows or text.reads > reads or follows == "]":
            yield elements
            elements, reads = [], text.reads
    if text.peek():
        raise text.wrong("more text follows the array", text.at)


class _Text:
    """A window on the file's text.

    Attributes:
        at: how far in the window it was read.
        reads: how often more of the file was taken in.
    """

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self._path = path
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._parse = json.JSONDecoder().raw_decode
        self._window = ""
        self._lines_before = 0
        self.at = 0
        self.reads = 0

    def peek(self) -> str:
        """The next character that is not blank; none at the end of the file."""
        while True:
            rest = self._window[self.at : self.at + 1]
            if rest and rest not in BLANK:
                return rest
            if rest:
                self.at += 1
            elif not self._more(READ_BYTES):
                return ""

    def expect(self, characters: str) -> str:
        """Step over one of these characters."""
        found = self.peek()
        if not found or found not in characters:
            raise self.wrong(f"expecting {' or '.join(map(repr, characters))}", self.at)
        self.at += 1
        return found

    def element(self) -> Any:
        """Step over one value."""
        self.peek()
        while True:
            try:
                value, end = self._parse(self._window, self.at)
            except RecursionError:
                raise self.wrong("nested too deeply", self.at) from None
            except ValueError as error:  # wrong, or not all there yet: only more text tells
                held = len(self._window) - self.at
                if held > MAX_LINE_BYTES or not self._more(max(READ_BYTES, held)):
                    at = error.pos if isinstance(error, json.JSONDecodeError) else self.at
                    raise self.wrong(getattr(error, "msg", str(error)), at) from None
            else:
                # A number at the end of the window could go on: 1, 1.5, 1e+9.
                if len(self._window) - end > len("e+") or not self._more(READ_BYTES):
                    self.at = end
                    return value

    def wrong(self, what: str, at: int) -> UsageError:
        """What is wrong at a place of the window."""
        line = self._lines_before + self._window.count("\n", 0, at) + 1
        return UsageError(f"invalid JSON: {what}", where=f"{self._path}:{line}")

    def _more(self, size: int) -> bool:
        data = self._file.read(size)
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            line = (
                self._lines_before + self._window.count("\n") + error.object[: error.start].count(b"\n") + 1
            )
            raise UsageError("not valid UTF-8", where=f"{self._path}:{line}") from None
        if not data:
            return False
        self._lines_before += self._window.count("\n", 0, self.at)
        self._window = self._window[self.at :] + text
        self.at = 0
        self.reads += 1
        return True
