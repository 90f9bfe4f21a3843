"""Blocks of input, cheap to make and to send; the records in them are parsed where the work is done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from rlctl.data.text_files import BOM
from rlctl.errors import UsageError

#: A longer line is no valid record; it becomes a bad row without being read into memory.
MAX_LINE_BYTES = 64 << 20


class FileRange(NamedTuple):
    """Whole lines of JSON in an uncompressed file, in bytes; whoever parses them reads them."""

    offset: int
    length: int


class OversizedLine(NamedTuple):
    """A line over `MAX_LINE_BYTES`: how it begins, and its bytes."""

    head: bytes
    length: int


class CsvRows(NamedTuple):
    """Rows of a CSV file: (line it begins on, fields, problem); the problem is empty where there is none."""

    header: list[str]
    delimiter: str
    rows: list[tuple[int, list[str], str]]


class ArrowRows(NamedTuple):
    """Rows of a Parquet or Arrow file, as one Arrow IPC stream."""

    stream: bytes


#: `bytes`: lines of JSON; a list: elements of a JSON array.
Content = FileRange | bytes | list[Any] | CsvRows | ArrowRows | OversizedLine


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of one file."""

    path: Path
    source: str  # what rows without a `data_source` of their own are called
    first_number: int  # line (text files) or row (the others) of the first one, from 1
    content: Content  # the rows, or where they are
    num_bytes: int  # bytes of the file that were read for it, for progress


class Record(NamedTuple):
    """One row of input, readable or not."""

    path: Path
    number: int  # line (text files) or row (JSON arrays, Parquet), from 1
    values: dict[str, Any] | None  # its columns; None when it could not be read
    problem: str = ""  # why not
    source: bytes | str | None = None  # the text as it stood in the file, where there is one

    @property
    def where(self) -> str:
        """`file:row`."""
        return f"{self.path}:{self.number}"

    @property
    def raw(self) -> str:
        """The row as text; bytes that are not UTF-8 are escaped."""
        if isinstance(self.source, bytes):
            return self.source.decode(errors="backslashreplace").strip("\r\n")
        return json.dumps(self.values, default=str) if self.source is None else self.source


def to_stream(batch: Any, compression: str | None = None) -> bytes:
    """One Arrow record batch as an IPC stream: bytes that any process can read."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def records_of(block: Block) -> Iterator[Record]:
    """Every row of a block, unreadable ones included; blank lines are none.

    Raises:
        UsageError: the block's file is not what it was when the block was made.
    """
    match block.content:
        case FileRange() as where:
            return _json_lines(block, _read(block.path, where))
        case bytes() as lines:
            return _json_lines(block, lines)
        case CsvRows() as table:
            return _csv_records(block, table)
        case ArrowRows(stream):
            return _arrow_records(block, stream)
        case OversizedLine(head, length):
            problem = f"a line of {length / 2**20:.0f} MiB (the limit is {MAX_LINE_BYTES >> 20})"
            return iter([Record(block.path, block.first_number, None, problem, head + b"...")])
        case rows:
            numbered = enumerate(rows, block.first_number)
            return (_checked(block.path, number, values) for number, values in numbered)


def _read(path: Path, where: FileRange) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(where.offset)
            lines = file.read(where.length)
    except OSError as error:
        what = f"the file cannot be read any more: {error.strerror or error}"
        raise UsageError(what, where=str(path), fix="start again") from error
    if len(lines) < where.length:
        raise UsageError("the file became shorter while it was read", where=str(path), fix="start again")
    return lines


def _json_lines(block: Block, lines: bytes) -> Iterator[Record]:
    if block.first_number == 1:
        lines = lines.removeprefix(BOM)
    for number, line in enumerate(lines.split(b"\n"), start=block.first_number):
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError:
            if line.strip():
                yield _json_or_why(block.path, number, line)
            continue
        yield _checked(block.path, number, values, line)


def _json_or_why(path: Path, number: int, line: bytes) -> Record:
    """What orjson refuses: `json` takes NaN and huge numbers, and says better what is wrong."""
    bad = partial(Record, path, number, None, source=line)
    whole = line
    line = line.rstrip().removesuffix(b",")  # of an array whose brackets are missing
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return bad(f"not valid UTF-8 at byte {error.start + 1}")
    except RecursionError:
        return bad("invalid JSON: nested too deeply")
    except ValueError as error:
        return bad(f"invalid JSON: {error}")
    return _checked(path, number, values, whole)


def _checked(path: Path, number: int, values: object, source: bytes | None = None) -> Record:
    if isinstance(values, dict):
        return Record(path, number, values, source=source)
    return Record(path, number, None, "not a JSON object", source or json.dumps(values))


def _csv_records(block: Block, table: CsvRows) -> Iterator[Record]:
    for number, fields, problem in table.rows:
        raw = table.delimiter.join(fields).encode(errors="surrogateescape")
        values = None if problem else dict(zip(table.header, fields, strict=True))
        yield Record(block.path, number, values, problem, raw)


def _arrow_records(block: Block, stream: bytes) -> Iterator[Record]:
    import pyarrow as pa

    table = pa.ipc.open_stream(stream).read_all()
    holds_bytes = "binary" in str(table.schema.types)
    try:
        rows = table.to_pylist()
    except (UnicodeDecodeError, ValueError):  # text or a date that Python cannot hold: find the rows
        rows = None
    for place in range(table.num_rows):
        number = block.first_number + place
        try:
            values = rows[place] if rows is not None else table.slice(place, 1).to_pylist()[0]
        except (UnicodeDecodeError, ValueError) as error:
            yield Record(block.path, number, None, f"a value cannot be read: {error}")
        else:
            yield Record(block.path, number, _as_text(values) if holds_bytes else values)


def _as_text(value: Any) -> Any:
    """Bytes that are UTF-8 as text, at any depth: some writers leave out that a column is text."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):
        return {name: _as_text(inner) for name, inner in value.items()}
    return [_as_text(inner) for inner in value] if isinstance(value, list) else value
