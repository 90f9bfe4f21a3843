"""Opens text files as UTF-8 bytes, decompressed and recoded; recognises formats by the first bytes.

Also reads JSON documents element by element, so that they need not fit into memory.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rlctl.errors import UsageError
from rlctl.prepare.compressed import decompressed

BOM = b"\xef\xbb\xbf"
#: Number of first bytes of a file that are used to recognise its format.
HEAD_BYTES = 1 << 16
#: Bytes of a JSON document that are read at a time.
READ_BYTES = 1 << 20
#: A longer line, or element of a JSON document, is not read into memory.
MAX_LINE_BYTES = 64 << 20
#: Keys under which JSON files store a list of rows.
CONTAINERS = {"data", "rows", "examples", "instances", "items", "records", "samples", "questions", "problems"}

_BLANK = " \t\r\n"
_NOT_TEXT = {
    b"PAR1": "Parquet: name it .parquet",
    b"ARROW1": "Arrow: name it .arrow",
    b"PK\x03\x04": "a zip archive (or an Excel file): name it .zip, or save it as CSV",
}
_BOMS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_CONTAINER = re.compile(rb'\s*\{\s*"(?i:' + "|".join(CONTAINERS).encode() + rb')"\s*:\s*\[')


@dataclass(frozen=True, slots=True)
class TextFile:
    """An open text file."""

    file: Any  # its bytes, decompressed, as UTF-8
    head: bytes  # the first bytes of `file`, at most about `HEAD_BYTES`
    is_whole: bool  # the head is the whole file
    position: Callable[[], int]  # number of bytes of the file on disk read so far


@contextmanager
def open_text(path: Path) -> Iterator[TextFile]:
    """Opens a file; decompresses it by its suffix or first bytes, and recodes UTF-16 and UTF-32 to UTF-8.

    UTF-16 is recognised with or without a byte-order mark, UTF-32 only with one.

    Raises:
        UsageError: the file is not a text file.
        OSError: the compressed data is truncated, or the UTF-16 or UTF-32 text is invalid.
    """
    with decompressed(path) as (file, _):
        head = file.read(HEAD_BYTES)
    if kind := _starts(head, _NOT_TEXT):
        what, _, fix = kind.partition(": ")
        raise UsageError(f"by its content the file is {what}", where=str(path), fix=fix)
    is_whole = len(head) < HEAD_BYTES
    if encoding := _encoding(head):
        head = head.decode(encoding, "ignore").encode(errors="ignore")
    with decompressed(path) as (file, position):
        text = io.BufferedReader(_Recoded(file, encoding)) if encoding else file
        yield TextFile(text, head, is_whole, position)


def _starts(head: bytes, kinds: dict[bytes, str]) -> str | None:
    return next((kind for magic, kind in kinds.items() if head.startswith(magic)), None)


def _encoding(head: bytes) -> str | None:
    """Encoding of text that is not UTF-8, by its byte-order mark or its zero bytes; None for UTF-8."""
    if marked := _starts(head, _BOMS):
        return marked
    low, high = head[0:2000:2].count(0), head[1:2000:2].count(0)
    fewest = len(head[:2000]) / 40
    if head[1:2] == b"\0" != head[:1] and high > fewest and low < high / 4:
        return "utf-16-le"
    if head[:1] == b"\0" != head[1:2] and low > fewest and high < low / 4:
        return "utf-16-be"
    return None


class _Recoded(io.RawIOBase):
    """A stream recoded to UTF-8. Lone surrogates are kept, so that only their rows are refused."""

    def __init__(self, file: Any, encoding: str) -> None:
        self._text = io.TextIOWrapper(file, encoding, "surrogatepass", newline="")
        self._left = b""

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads up to one chunk of the stream into the buffer; returns the number of bytes."""
        try:
            self._left = self._left or self._text.read(HEAD_BYTES).encode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise OSError(f"the {self._text.encoding} text is not valid: {error.reason}") from None
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def is_json_lines(text: TextFile) -> bool:
    """Whether each line is a separate JSON value, or else the whole file is one."""
    head = text.head.removeprefix(BOM).lstrip()
    line, newline, rest = head.partition(b"\n")
    following = rest.lstrip()[:1]
    if head[:1] == b"[":
        return following == b"[" and _is_json(line)
    if head[:1] != b"{":
        return True
    if not newline and not text.is_whole:
        return not _CONTAINER.match(head)
    if _is_json(line):
        return bool(following) or not text.is_whole
    return following in (b"{", b"")


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as `object_pairs_hook` of `json`.

    Raises:
        ValueError: a key occurs twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


def csv_delimiter(path: Path, head: bytes) -> str:
    """Returns the delimiter of the file's suffix, or another one if only that splits the header."""
    usual = "\t" if ".tsv" in path.name.lower() else ","
    lines = head.removeprefix(BOM).decode(errors="replace").splitlines() or [""]

    def fields(delimiter: str) -> int:
        try:
            return len(next(csv.reader(lines[:1], delimiter=delimiter), ()))
        except csv.Error:
            return 0

    return usual if fields(usual) > 1 else max((usual, ",", ";", "\t", "|"), key=fields)


def document_rows(path: Path, file: io.BufferedReader, max_rows: int) -> Iterator[list[Any]]:
    """Yields the rows of a document: elements of an array or of an object's only list, or the object itself.

    A list has at most `max_rows` rows, or the rows of about `READ_BYTES`.

    Raises:
        UsageError: the document is not JSON or not UTF-8, an element is longer than `MAX_LINE_BYTES`, or an
            object contains several lists of rows, or columns instead of rows.
    """
    text = _Document(path, file)
    is_object = text.peek() == "{"
    yield from _object_rows(path, text, max_rows) if is_object else _elements(text, max_rows)
    if text.peek():
        raise text.wrong("more text follows the value", text.at)


def _object_rows(path: Path, text: _Document, max_rows: int) -> Iterator[list[Any]]:
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


def _elements(text: _Document, max_rows: int) -> Iterator[list[Any]]:
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


class _Document:
    """Parser with a sliding window over the text of a JSON document."""

    def __init__(self, path: Path, file: io.BufferedReader) -> None:
        self._path = path
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._parse = json.JSONDecoder(object_pairs_hook=with_unique_keys).raw_decode
        self._window = ""
        self._lines_before = 0
        self.at = 0  # position in the window
        self.reads = 0  # number of times that the window was extended

    def peek(self) -> str:
        """Returns the next character that is not blank; "" at the end of the file."""
        while True:
            while (found := self._window[self.at : self.at + 1]) and found in _BLANK:
                self.at += 1
            if found or not self._more(READ_BYTES):
                return found

    def begins_rows(self) -> bool:
        """Whether a list of objects comes next; consumes nothing."""
        if self.peek() != "[":
            return False
        place = self.at + 1
        while True:
            rest = self._window[place:].lstrip(_BLANK)
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
            except json.JSONDecodeError as error:  # invalid, or incomplete: more text decides
                held = len(self._window) - self.at
                if held > MAX_LINE_BYTES or not self._more(max(READ_BYTES, held)):
                    raise self.wrong(error.msg, error.pos) from None
            except ValueError as error:  # a key that occurs twice, or a number of too many digits
                raise self.wrong(str(error), self.at) from None
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
