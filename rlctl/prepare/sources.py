"""Input files as a stream of records, each with the row it stands on; memory holds one batch at most."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, cast

from rlctl.errors import UsageError

#: A JSON array is read in one piece; anything larger belongs in JSON Lines.
MAX_JSON_BYTES = 1 << 30
MAX_CSV_FIELD_CHARS = 1 << 30
BATCH_ROWS = 1024
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """One row of input, readable or not.

    Attributes:
        path: the file.
        number: line (text files) or row (JSON arrays, Parquet), from 1.
        values: its columns; None when it could not be read.
        problem: why not.
        raw: the text as it stood in the file, where there is one.
    """

    path: Path
    number: int
    values: dict[str, Any] | None
    problem: str = ""
    raw: str = ""

    @property
    def where(self) -> str:
        """`file:row`."""
        return f"{self.path}:{self.number}"


Advance = Callable[[int], None]  # told how many bytes of input have been read since the last call
Reader = Callable[[Path, Advance], Iterator[Record]]


def find_sources(names: Sequence[str]) -> list[Path]:
    """The files meant: each as given, a directory as its readable files in order of name.

    Raises:
        UsageError: one does not exist, or is of no known format.
    """
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.is_file() and _reader(file))
            if not inside:
                raise UsageError("the directory holds no file of a known format", where=name, fix=_FORMATS)
            found += inside
        elif not path.exists():
            raise UsageError("no such file or directory", where=name)
        elif _reader(path) is None:
            raise UsageError("the file's format is not known by its name", where=name, fix=_FORMATS)
        else:
            found.append(path)
    return found


def read_records(path: Path, advance: Advance = lambda _: None) -> Iterator[Record]:
    """Every row of one file, unreadable ones included.

    Raises:
        UsageError: the file as a whole cannot be read (empty, truncated, corrupt); names the row reached.
    """
    reader = _reader(path)
    if reader is None:
        raise UsageError("the file's format is not known by its name", where=str(path), fix=_FORMATS)
    number = 0
    try:
        for record in reader(path, advance):
            number = record.number
            yield record
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _broken(path, number, f"the gzip data ends or breaks off: {error}") from error
    except OSError as error:
        raise _broken(path, number, str(error)) from error
    if number == 0:
        raise UsageError("the file is empty: it has no rows", where=str(path))


def _broken(path: Path, number: int, reason: str) -> UsageError:
    after = f" after row {number}" if number else ""
    return UsageError(f"the file cannot be read{after}: {reason}", where=str(path), fix="get it again")


def _open(path: Path, raw: IO[bytes]) -> IO[bytes]:
    return cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if path.suffix.lower() == ".gz" else raw


def _telling(records: Iterable[Record], raw: IO[bytes], advance: Advance) -> Iterator[Record]:
    """Pass records on, and now and then the bytes read."""
    told = 0
    for count, record in enumerate(records):
        if count % BATCH_ROWS == 0:
            advance(raw.tell() - told)
            told = raw.tell()
        yield record
    advance(raw.tell() - told)


def _read_jsonl(path: Path, advance: Advance) -> Iterator[Record]:
    with path.open("rb") as raw, _open(path, raw) as lines:
        records = (
            _json_record(path, number, line)
            for number, line in enumerate(lines, start=1)
            if line.removeprefix(BOM).strip()
        )
        yield from _telling(records, raw, advance)


def _json_record(path: Path, number: int, line: bytes) -> Record:
    if number == 1:
        line = line.removeprefix(BOM)
    raw = line.decode(errors="backslashreplace").rstrip("\r\n")
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return Record(path, number, None, f"not valid UTF-8 at byte {error.start + 1}", raw)
    except RecursionError:
        return Record(path, number, None, "invalid JSON: nested too deeply", raw)
    except ValueError as error:
        return Record(path, number, None, f"invalid JSON: {error}", raw)
    if not isinstance(values, dict):
        return Record(path, number, None, "not a JSON object", raw)
    return Record(path, number, values, raw=raw)


def _read_json(path: Path, advance: Advance) -> Iterator[Record]:
    """A JSON array of objects; or JSON Lines, which often go by this name."""
    with path.open("rb") as raw, _open(path, raw) as file:
        if not file.read(64).removeprefix(BOM).lstrip().startswith(b"["):
            yield from _read_jsonl(path, advance)
            return
        file.seek(0)
        content = file.read(MAX_JSON_BYTES + 1)
        advance(raw.tell())
    if len(content) > MAX_JSON_BYTES:
        raise UsageError(
            f"a JSON array of more than {MAX_JSON_BYTES >> 30} GiB",
            where=str(path),
            fix="convert it to JSON Lines",
        )
    try:
        rows = json.loads(content.removeprefix(BOM).decode())
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError("not valid UTF-8", where=f"{path}:{line}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"invalid JSON: {error.msg}", where=f"{path}:{error.lineno}") from error
    except RecursionError:
        raise UsageError("invalid JSON: nested too deeply", where=str(path)) from None
    for number, values in enumerate(rows, start=1):
        raw_text = json.dumps(values)
        if isinstance(values, dict):
            yield Record(path, number, values, raw=raw_text)
        else:
            yield Record(path, number, None, "not a JSON object", raw_text)


def _read_csv(path: Path, advance: Advance) -> Iterator[Record]:
    csv.field_size_limit(MAX_CSV_FIELD_CHARS)
    delimiter = "\t" if ".tsv" in path.name.lower() else ","
    with path.open("rb") as raw, _open(path, raw) as file:
        # Bytes that are not UTF-8 come through as lone surrogates, which the row checks refuse by row.
        text = TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        yield from _telling(_csv_records(path, text, delimiter), raw, advance)


def _csv_records(path: Path, text: Iterable[str], delimiter: str) -> Iterator[Record]:
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Record(path, number, None, f"invalid CSV: {error}")
            continue
        if not fields:
            continue
        if header is None:
            header = fields
        elif len(fields) != len(header):
            problem = f"{len(fields)} fields where the header has {len(header)}"
            yield Record(path, number, None, problem, delimiter.join(fields))
        else:
            yield Record(path, number, dict(zip(header, fields, strict=True)), raw=delimiter.join(fields))


def _read_parquet(path: Path, advance: Advance) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            bytes_per_row = path.stat().st_size / max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                for place in range(batch.num_rows):
                    number += 1
                    yield _arrow_record(path, number, batch, place)
                advance(int(bytes_per_row * batch.num_rows))
    except pa.ArrowException as error:
        raise _broken(path, number, str(error).splitlines()[0]) from error


def _arrow_record(path: Path, number: int, batch: Any, place: int) -> Record:
    try:
        values = batch.slice(place, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return Record(path, number, None, f"not valid UTF-8: {error.reason}")
    return Record(path, number, values)


_READERS: dict[str, Reader] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
_FORMATS = "known: .jsonl, .ndjson, .json, .csv, .tsv (each also .gz) and .parquet"


def _reader(path: Path) -> Reader | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        inner = _READERS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if inner is _read_parquet else inner
    return _READERS.get(suffixes[-1]) if suffixes else None
