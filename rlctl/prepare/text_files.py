"""Opens text files as UTF-8 bytes, decompressed by their suffix; recognises and parses JSON and CSV."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from rlctl.errors import UsageError

BOM = b"\xef\xbb\xbf"
#: Suffix → name of the compression in Arrow.
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
#: Number of first bytes of a file that are used to recognise its format.
HEAD_BYTES = 1 << 16
#: A longer line is not read into memory, and neither is a longer JSON document.
MAX_LINE_BYTES = 64 << 20
MAX_DOCUMENT_BYTES = 1 << 30
#: Keys under which JSON files store a list of rows.
CONTAINERS = {"data", "rows", "examples", "instances", "items", "records", "samples", "questions", "problems"}

_UTF_16 = "UTF-16 or UTF-32 text: save it as UTF-8"
#: First bytes of files that are no plain text → what they are, and what to do.
_NOT_TEXT = {
    b"PAR1": "Parquet: name it .parquet",
    b"ARROW1": "Arrow: name it .arrow",
    b"PK\x03\x04": "a zip archive (or an Excel file): unpack it, or save it as CSV",
    b"\x1f\x8b": "compressed by gzip: name it .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: name it .zst",
    b"BZh": "compressed by bzip2: name it .bz2",
    b"\xfd7zXZ": "compressed by xz: unpack it",
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE), _UTF_16),
}
_LONG_NUMBER = re.compile(rb"\d{19}")
_SPACED_COLON = re.compile(rb"\s:")
_CONTAINER = re.compile(rb'\s*\{\s*"(?i:' + "|".join(CONTAINERS).encode() + rb')"\s*:\s*\[')


@dataclass(frozen=True, slots=True)
class TextFile:
    """An open text file."""

    file: io.BufferedReader  # its bytes, decompressed
    head: bytes  # the first bytes of `file`, at most about `HEAD_BYTES`
    is_whole: bool  # the head is the whole file
    position: Callable[[], int]  # number of bytes of the file on disk read so far


@contextmanager
def open_text(path: Path) -> Iterator[TextFile]:
    """Opens a file, and decompresses it by its suffix.

    Raises:
        UsageError: by its first bytes the file is not a text file in UTF-8.
        OSError: the compressed data is truncated or damaged.
    """
    file, _ = _opened(path)
    with file:
        head = file.read(HEAD_BYTES)
    kind = next((kind for magic, kind in _NOT_TEXT.items() if head.startswith(magic)), None)
    if kind or b"\0" in head[:2]:  # a zero byte: UTF-16 without a byte-order mark
        message, _, fix = (kind or _UTF_16).partition(": ")
        raise UsageError(f"by its content the file is {message}", where=str(path), fix=fix)
    file, position = _opened(path)
    with file:
        yield TextFile(file, head, len(head) < HEAD_BYTES, position)


def _opened(path: Path) -> tuple[io.BufferedReader, Callable[[], int]]:
    """The content of a file, and a function: bytes of the file on disk read so far."""
    raw = path.open("rb")
    codec = CODECS.get(path.suffix.lower())
    return io.BufferedReader(pa.CompressedInputStream(raw, codec)) if codec else raw, raw.tell


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
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def parse_json(text: bytes) -> Any:
    """The value of a JSON text in UTF-8, in which no key of an object occurs twice.

    Raises:
        ValueError: it is not valid; a `UnicodeDecodeError` or `JSONDecodeError` gives the place.
    """
    with suppress(orjson.JSONDecodeError):
        value = orjson.loads(text)
        if _is_exact(text, value):
            return value
    try:
        return json.loads(text.decode("utf-8-sig"), object_pairs_hook=_with_unique_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _is_exact(text: bytes, value: Any) -> bool:
    """Whether `value`, which orjson read, is surely what `parse_json` returns.

    orjson keeps the last of equal keys, and rounds integers of more than 64 bits.
    """
    if _SPACED_COLON.search(text) or _LONG_NUMBER.search(text):
        return False
    return text.count(b'":') == _num_keys(value)  # more: a key occurs twice, or in a text


def _num_keys(value: Any) -> int:
    """Keys of all objects in a value."""
    if isinstance(value, dict):
        return len(value) + sum(_num_keys(item) for item in value.values() if isinstance(item, dict | list))
    if isinstance(value, list):
        return sum(_num_keys(item) for item in value if isinstance(item, dict | list))
    return 0


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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


def document_rows(path: Path, file: io.BufferedReader) -> list[Any]:
    """The rows of a JSON document: elements of an array or of an object's only list, or the object itself.

    Raises:
        UsageError: the document is not JSON or not UTF-8, is too large to be read as a whole, or is an object
            with several lists of rows, or with columns instead of rows.
    """
    text = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(text) > MAX_DOCUMENT_BYTES:
        message = f"a JSON document of more than {MAX_DOCUMENT_BYTES >> 20} MiB"
        raise UsageError(message, where=str(path), fix="write one object per line (.jsonl)")
    try:
        value = parse_json(text)
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise UsageError("not valid UTF-8", where=f"{path}:{line}") from None
    except ValueError as error:
        line = getattr(error, "lineno", 0)
        message = f"invalid JSON: {getattr(error, 'msg', error)}"
        raise UsageError(message, where=f"{path}:{line}" if line else str(path)) from None
    return value if isinstance(value, list) else _rows_in(path, value)


def _rows_in(path: Path, value: Any) -> list[Any]:
    """The rows in an object."""
    if not isinstance(value, dict):
        return [value]
    # A list of messages is a value of one row.
    begins = {name: each[0] for name, each in value.items() if isinstance(each, list) and each}
    lists = [name for name, first in begins.items() if isinstance(first, dict) and "role" not in first]
    containers = [name for name in value if name.lower() in CONTAINERS and isinstance(begins.get(name), dict)]
    if len(containers) == 1 or (len(value) == 1 and lists):
        return list(value[(containers or lists)[0]])
    if len(value) == 1 and isinstance(inner := next(iter(value.values())), dict):
        return _rows_in(path, inner)
    several = containers or (lists if value and len(lists) == len(value) else [])
    if several:
        message = f"the object holds several lists of rows: {', '.join(several)}"
        raise UsageError(message, where=str(path), fix="write each list to a separate file")
    if len(value) > 1 and _are_columns(list(value.values())):
        fix = "write a list of rows, in pandas `to_json(path, orient='records')`"
        raise UsageError("the object holds columns, not rows", where=str(path), fix=fix)
    return [value]


def _are_columns(values: list[Any]) -> bool:
    """Whether these are lists of one length, or objects with the same keys, and the first holds scalars."""
    first = values[0]
    kind = type(values[0])
    if kind not in (dict, list) or not all(isinstance(value, kind) and value for value in values):
        return False
    same = all((list(v) == list(first)) if kind is dict else (len(v) == len(first)) for v in values)
    inner = first.values() if kind is dict else first
    return same and not any(isinstance(item, dict | list) for item in inner)
