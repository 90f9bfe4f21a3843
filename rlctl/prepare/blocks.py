"""Blocks of input rows: cheap to create and to send to the processes that parse the records in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from rlctl.data.read import python_rows
from rlctl.errors import UsageError
from rlctl.prepare.text_files import BOM, parse_json
from rlctl.processes import limited_memory

#: Memory that one block of rows of a Parquet or Arrow file may take.
MAX_BATCH_BYTES = 2 << 30


class CsvRows(NamedTuple):
    """Rows of a CSV file: (first line, fields, problem); the problem is empty if there is none."""

    header: list[str]
    delimiter: str
    rows: list[tuple[int, list[str], str]]


class ArrowRows(NamedTuple):
    """Rows of a Parquet or Arrow file, as one Arrow IPC stream."""

    stream: bytes


#: `bytes`: lines of JSON; a list: elements of a JSON array.
Content = bytes | list[Any] | CsvRows | ArrowRows


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of one file."""

    path: Path
    source: str  # data source of rows without a `data_source`
    first_number: int  # number of the first line (text files) or row (other files), from 1
    content: Content  # the rows
    num_bytes: int  # bytes of the file read for it, to report progress


class Record(NamedTuple):
    """One row of input, readable or not."""

    path: Path
    number: int  # line (text files) or row (JSON arrays, Parquet), from 1
    values: dict[str, Any] | None  # its columns; None if it cannot be read
    problem: str = ""  # why it cannot be read or used
    source: bytes | str | None = None  # its text, for JSON lines and CSV

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
    """Serialises an Arrow record batch as an IPC stream."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def records_of(block: Block) -> Iterator[Record]:
    """Returns every row of a block, including unreadable ones; blank lines are skipped."""
    match block.content:
        case bytes() as lines:
            return _json_lines(block, lines)
        case CsvRows() as table:
            return _csv_records(block, table)
        case ArrowRows(stream):
            return _arrow_records(block, stream)
        case rows:
            numbered = enumerate(rows, block.first_number)
            return (_checked(block.path, number, values) for number, values in numbered)


def _json_lines(block: Block, lines: bytes) -> Iterator[Record]:
    for number, line in enumerate(lines.split(b"\n"), start=block.first_number):
        bad = partial(Record, block.path, number, None, source=line)
        try:
            values = parse_json(line.rstrip().removesuffix(b","))  # an array without its brackets
        except UnicodeDecodeError as error:
            yield bad(f"not valid UTF-8 at byte {error.start + 1}")
        except ValueError as error:
            if line.removeprefix(BOM).strip():
                yield bad(f"invalid JSON: {error}")
        else:
            yield _checked(block.path, number, values, line)


def _checked(path: Path, number: int, values: object, source: bytes | None = None) -> Record:
    """A row; a list of turns (Open-Reasoner-Zero) has its places as columns, as on the hub."""
    if (
        isinstance(values, list)
        and values
        and all(isinstance(value, dict) and "from" in value for value in values)
    ):
        values = {str(index): value for index, value in enumerate(values)}
    if isinstance(values, dict):
        return Record(path, number, values, source=source)
    return Record(
        path=path,
        number=number,
        values=None,
        problem="not a JSON object",
        source=source or json.dumps(values),
    )


def _csv_records(block: Block, table: CsvRows) -> Iterator[Record]:
    for number, fields, problem in table.rows:
        raw = table.delimiter.join(fields).encode(errors="surrogateescape")
        values = None if problem else dict(zip(table.header, fields, strict=True))
        yield Record(
            path=block.path,
            number=number,
            values=values,
            problem=problem,
            source=raw,
        )


@contextmanager
def bounded_memory(path: Path) -> Iterator[None]:
    """Context in which rows of a file are unpacked: a few KiB can hold values that take any amount of memory.

    Raises:
        UsageError: they take more than `MAX_BATCH_BYTES`.
    """
    try:
        with limited_memory(MAX_BATCH_BYTES):
            yield
    except MemoryError as error:
        message = f"a few rows expand to more than {MAX_BATCH_BYTES / 2**30:.2g} GiB"
        raise UsageError(message, where=str(path), fix="write fewer or shorter values to a row") from error


def _arrow_records(block: Block, stream: bytes) -> Iterator[Record]:
    with bounded_memory(block.path):
        table = _shortest_numbers(pa.ipc.open_stream(stream).read_all())
        rows = list(python_rows(table))
    holds_bytes = "binary" in str(table.schema.types)
    for number, values in enumerate(rows, block.first_number):
        if isinstance(values, Exception):
            yield Record(block.path, number, None, f"a value cannot be read: {values}")
        else:
            yield Record(block.path, number, _as_text(values) if holds_bytes else values)


def _shortest_numbers(table: pa.Table) -> pa.Table:
    """Converts float32 columns to the float64 numbers with the same digits: 0.1 instead of 0.10000000149."""
    for index, column in enumerate(table.schema):
        if pa.types.is_float32(column.type):
            values = table.column(index).cast(pa.string()).cast(pa.float64())
            table = table.set_column(index, column.name, values)
    return table


def _as_text(value: Any) -> Any:
    """Decodes bytes that are UTF-8, at any depth, because some writers do not mark text columns as text."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):
        return {name: _as_text(inner) for name, inner in value.items()}
    return [_as_text(inner) for inner in value] if isinstance(value, list) else value
