"""Opens text files as UTF-8 bytes, decompressed and recoded; recognises formats by the first bytes."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from rlctl.errors import UsageError

BOM = b"\xef\xbb\xbf"
CODECS = {".gz": "gzip", ".zst": "zstd"}
#: Number of first bytes of a file that are used to recognise its format.
HEAD_BYTES = 1 << 16
#: Keys under which JSON files store a list of rows.
CONTAINERS = {"data", "rows", "examples", "instances", "items", "records", "samples", "questions", "problems"}

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_NOT_TEXT = {
    b"PAR1": "Parquet: name it .parquet",
    b"ARROW1": "Arrow: name it .arrow",
    b"PK\x03\x04": "a zip archive (or an Excel file): unpack it",
    b"BZh": "bzip2: compress it with gzip or zstd instead",
    b"\xfd7zXZ": "xz: compress it with gzip or zstd instead",
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
    in_place: bool  # `file` has the same bytes as the file on disk


@contextmanager
def open_text(path: Path) -> Iterator[TextFile]:
    """Opens a file; decompresses it by its suffix or first bytes, and recodes UTF-16 and UTF-32 to UTF-8.

    UTF-16 is recognised with or without a byte-order mark, UTF-32 only with one. If lines end in a carriage
    return alone, each becomes a line feed.

    Raises:
        UsageError: the file is not a text file.
        OSError: the compressed data is truncated, or the UTF-16 or UTF-32 text is invalid.
    """
    with _decompressed(path) as (file, _):
        head = file.read(HEAD_BYTES)
    if kind := _starts(head, _NOT_TEXT):
        what, _, fix = kind.partition(": ")
        raise UsageError(f"by its content the file is {what}", where=str(path), fix=fix)
    is_whole = len(head) < HEAD_BYTES
    if encoding := _encoding(head):
        head = head.decode(encoding, "ignore").encode(errors="ignore")
    ends_in_returns = b"\r" in head.removesuffix(b"\r") and b"\n" not in head
    if ends_in_returns:
        head = head.replace(b"\r", b"\n")
    with _decompressed(path) as (file, raw):
        is_recoded = bool(encoding or ends_in_returns)
        text = io.BufferedReader(_Recoded(file, encoding, ends_in_returns)) if is_recoded else file
        yield TextFile(text, head, is_whole, raw.tell, in_place=text is raw)


@contextmanager
def _decompressed(path: Path) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
    """The file, decompressed and as it is on disk: the same object if it is not compressed."""
    with path.open("rb") as raw:
        codec = CODECS.get(path.suffix.lower()) or _starts(raw.peek(8), _COMPRESSED)
        if codec is None:
            yield raw, raw
            return
        with pa.CompressedInputStream(raw, codec) as plain:
            yield io.BufferedReader(plain, HEAD_BYTES), raw


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
    """A stream recoded to UTF-8 with line feeds.

    Lone surrogates and bytes that are not UTF-8 are kept, so that only their rows are refused.
    """

    def __init__(self, file: Any, encoding: str | None, ends_in_returns: bool) -> None:
        self._errors = "surrogatepass" if encoding else "surrogateescape"
        newline = None if ends_in_returns else ""
        self._text = io.TextIOWrapper(file, encoding or "utf-8", self._errors, newline)
        self._left = b""

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads up to one chunk of the stream into the buffer; returns the number of bytes."""
        try:
            self._left = self._left or self._text.read(HEAD_BYTES).encode("utf-8", self._errors)
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
