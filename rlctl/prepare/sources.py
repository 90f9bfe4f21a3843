"""Finds input files by name, and reads them as blocks with at most one block in memory."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader, TextIOWrapper
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlctl.data.read import check_splits
from rlctl.data.records import check_columns
from rlctl.errors import EnvironmentFailure, UsageError, first_line
from rlctl.extras import is_installed
from rlctl.prepare.blocks import (
    ArrowRows,
    Block,
    Content,
    CsvRows,
    Record,
    bounded_memory,
    records_of,
    to_stream,
)
from rlctl.prepare.text_files import (
    CODECS,
    MAX_LINE_BYTES,
    csv_delimiter,
    document_rows,
    is_json_lines,
    open_text,
)

HUB = "hf:"
LEAVE_OUT = "leave it out, or write rows into it"
BLOCK_ROWS = 4096
BLOCK_BYTES = 2 << 20
#: Files of `prepare-data` and of `datasets` that contain no rows, or those of other versions.
_NOT_ROWS = re.compile(
    r"manifest\.json|quarantine\.jsonl|dataset_(?:dict|infos?)\.json|state\.json|cache-.*\.arrow"
)
#: A file of a dataset that `save_to_disk` wrote: its number, and the number of all.
_SAVED = re.compile(r"data-(\d{5})-of-(\d{5})\.arrow")


@dataclass(frozen=True, slots=True)
class Source:
    """One input file."""

    path: Path
    name: str  # data source of rows if neither they nor the request name one

    @property
    def num_bytes(self) -> int:
        """Size in bytes, for the progress."""
        return self.path.stat().st_size


def find_sources(names: Sequence[str]) -> list[Source]:
    """Finds the input files for names of files, directories and Hugging Face datasets.

    A directory gives all readable files in it and below it, ordered by name; a Hugging Face dataset gives its
    Arrow files.

    Raises:
        UsageError: a name does not exist, has no known format, or is a dataset of several splits.
        EnvironmentFailure: a dataset of the hub cannot be loaded.
    """
    return [source for name in names for source in _find(name)]


def _find(name: str) -> list[Source]:
    if name.startswith(HUB):
        return _hub_files(name)
    path = Path(name)
    if path.is_dir():
        inside = _inside(path)
        if inside:
            return inside
        raise UsageError("the directory holds no file of a known format", where=name, fix=_FORMATS)
    if not path.exists():
        raise UsageError("no such file or directory", where=name)
    if not path.is_file() or _reader(path) is None:
        raise UsageError("the file's format is not known by its name", where=name, fix=_FORMATS)
    return [_file(path)]


def _file(path: Path) -> Source:
    if _SAVED.fullmatch(path.name):
        return Source(path, path.resolve().parent.name)
    return Source(path, path.name.split(".")[0] or "data")


def _inside(path: Path) -> list[Source]:
    """The readable files in a directory and below it, ordered by name, without hidden ones."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise UsageError(
            f"the dataset has the splits {', '.join(splits)}: reading all of them would mix them",
            where=str(path),
            fix=f"name {' or '.join(str(path / name) for name in splits)}",
        )
    sources: list[Source] = []
    entries: list[Path] = []
    for entry in sorted(path.iterdir()):
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            if entry.is_file() and _reader(entry) and not _NOT_ROWS.fullmatch(entry.name):
                sources.append(_file(entry))
                entries.append(entry)
        elif not path.resolve().is_relative_to(entry.resolve()):  # not a link to a parent directory
            below = _inside(entry)
            entries += [entry] if below else []
            sources += below
    check_splits(path, entries)
    saved = [part for entry in entries if (part := _SAVED.fullmatch(entry.name))]
    if saved and len(saved) != int(saved[0][2]):
        message = f"the dataset is not complete: it has {len(saved)} of {int(saved[0][2])} files"
        raise UsageError(message, where=str(path), fix="save it again")
    return sources


def check_hub_package(name: str) -> None:
    """Checks that a data set of the hub can be read here.

    Raises:
        EnvironmentFailure: the package `datasets` is missing.
    """
    is_loaded = sys.modules.get("datasets") is not None
    if not is_loaded and not is_installed("datasets"):
        what = "datasets of the hub are read by the package `datasets`, which is missing"
        raise EnvironmentFailure(what, where=name, fix='pip install "rlctl[datasets]"')


def _hub_files(name: str) -> list[Source]:
    """The cached Arrow files of a dataset of the hub, downloaded if they are not cached.

    `hf:organisation/name[/configuration][@revision][:split]`; the default configuration is that of the
    dataset, else `main`; the default split is `train`. The name of the sources is `organisation/name`.
    """
    check_hub_package(name)
    hub_name, _, split = name.removeprefix(HUB).partition(":")
    hub_name, _, revision = hub_name.partition("@")
    *parts, last = hub_name.split("/")
    dataset, config = ("/".join(parts), last) if len(parts) == 2 else (hub_name, None)
    if not dataset or "[" in split:  # a slice is a view of files that contain more rows
        message = "a slice of a split cannot be read" if dataset else "no dataset is named"
        form = "hf:organisation/name[/configuration][@revision][:split]"
        raise UsageError(message, where=name, fix=f"write {form}")
    given = {"split": split or "train"} | ({"revision": revision} if revision else {})
    try:
        loaded = _loaded([dataset, config] if config else [dataset], given)
    except ValueError as error:  # an unknown split, or a dataset of several configurations
        fix = "name a configuration and split of its page: hf:organisation/name/configuration:split"
        raise UsageError(" ".join(str(error).split())[:300], where=name, fix=fix) from error
    except Exception as error:  # network, cache and hub errors of several libraries: no common base class
        fix = (
            "if it is a file or directory here: it does not exist; if it is on the hub: check its name and "
            "the network, or download its files and name them"
        )
        raise EnvironmentFailure(
            f"the dataset could not be loaded: {first_line(error)}", where=name, fix=fix
        ) from error
    if not loaded.cache_files:
        raise UsageError("the dataset has no rows", where=name)
    return [Source(Path(file["filename"]), dataset) for file in loaded.cache_files]


def _loaded(names: list[str], options: dict[str, str]) -> Any:
    """The dataset; with the configuration `main` if it needs one and none is named, as GSM8K does."""
    import datasets

    try:
        return datasets.load_dataset(*names, **options)
    except ValueError as error:
        if len(names) == 1 and "config" in str(error).lower():
            with suppress(ValueError):  # the first error says more
                return datasets.load_dataset(*names, "main", **options)
        raise


def read_records(source: Source) -> Iterator[Record]:
    """Yields every row of a file, including unreadable ones; raises the same errors as `read_blocks`."""
    for block in read_blocks(source):
        yield from records_of(block)


def read_blocks(source: Source) -> Iterator[Block]:
    """Yields the rows of a file as blocks, in order.

    Raises:
        UsageError: the file cannot be read as a whole (empty, truncated, corrupt); names the last row read.
    """
    reader = _reader(source.path)
    if reader is None:
        raise UsageError("the file's format is not known by its name", where=str(source.path), fix=_FORMATS)
    number = reported = 0
    try:
        for last_number, content, position in reader(source.path):
            yield Block(
                path=source.path,
                source=source.name,
                first_number=number + 1,
                content=content,
                num_bytes=position - reported,
            )
            number = last_number
            reported = position
    except (OSError, pa.ArrowException) as error:
        after = f" after row {number}" if number else ""
        codec = CODECS.get(source.path.suffix.lower())
        reason = f"the {codec} data is truncated or damaged: " if codec else ""
        message = f"the file cannot be read{after}: {reason}{first_line(error)}"
        raise UsageError(message, where=str(source.path), fix="get it again") from error
    if number == 0:
        raise UsageError("the file is empty: it has no rows", where=str(source.path), fix=LEAVE_OUT)


#: Number of the last row, the rows, bytes of the file read so far.
Piece = tuple[int, Content, int]
#: Line, fields, problem (empty if there is none).
CsvRow = tuple[int, list[str], str]
Reader = Callable[[Path], Iterator[Piece]]


def _whole_lines(path: Path, file: BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Yields the number of the last line, and a few whole lines; the last newline may be missing."""
    number = 0
    parts: list[bytes] = []  # start of an incomplete line
    while chunk := file.read(BLOCK_BYTES):
        cut = chunk.rfind(b"\n") + 1
        if cut:
            lines = b"".join([*parts, chunk[:cut]])
            number += lines.count(b"\n")
            yield number, lines
            parts = []
        parts.append(chunk[cut:])
        if sum(map(len, parts)) > MAX_LINE_BYTES:
            raise _too_long(path, number + 1)
    last = b"".join(parts)
    if last:
        yield number + 1, last


def _read_json(path: Path) -> Iterator[Piece]:
    """Reads JSON Lines, an array of objects, or an object; the suffix does not determine which."""
    with open_text(path) as text:
        if is_json_lines(text):
            for number, lines in _whole_lines(path, text.file):
                yield number, lines, text.position()
            return
        rows = document_rows(path, text.file)
        for start in range(0, len(rows), BLOCK_ROWS):
            block = rows[start : start + BLOCK_ROWS]
            yield start + len(block), block, text.position()


def _read_csv(path: Path) -> Iterator[Piece]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with open_text(path) as opened:
        delimiter = csv_delimiter(path, opened.head)
        # Bytes that are not UTF-8 become lone surrogates, so that the checks refuse only their rows.
        text = TextIOWrapper(opened.file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = _csv_rows(_bounded_lines(path, text), delimiter)
        line, header, problem = next(rows, (1, [], ""))
        if header in (["sep="], ["sep=", ""]):  # a line that Excel writes before the header
            line, header, problem = next(rows, (2, [], ""))
        header = _named(name.strip() for name in header)
        where = f"{path}:{line}"
        if problem:
            raise UsageError(f"the header cannot be read: {problem}", where=where)
        check_columns(header, where)
        while piece := list(_portion(rows, header)):
            yield piece[-1][0], CsvRows(header, delimiter, piece), opened.position()


def _named(header: Iterable[str]) -> list[str]:
    """The header, in which several columns without a name are numbered from 1."""
    names = list(header)
    if names.count("") < 2:
        return names
    return [name or f"column_{place}" for place, name in enumerate(names, 1)]


def _bounded_lines(path: Path, text: TextIOWrapper) -> Iterator[str]:
    for number in count(1):
        line = text.readline(MAX_LINE_BYTES)
        if len(line) == MAX_LINE_BYTES:
            raise _too_long(path, number)
        if not line:
            return
        yield line


def _too_long(path: Path, number: int) -> UsageError:
    message = f"a line has more than {MAX_LINE_BYTES >> 20} MiB"
    return UsageError(message, where=f"{path}:{number}", fix="write each row to a line of its own")


def _portion(rows: Iterator[CsvRow], header: list[str]) -> Iterator[CsvRow]:
    """Yields one block of rows; skips repeated headers, as in concatenated files."""
    chars = 0
    data = (row for row in rows if _named(name.strip() for name in row[1]) != header)
    for line, fields, problem in islice(data, BLOCK_ROWS):
        wrong = f"{len(fields)} fields where the header has {len(header)}"
        yield line, fields, problem or ("" if len(fields) == len(header) else wrong)
        chars += sum(map(len, fields))
        if chars > BLOCK_BYTES:
            return


def _csv_rows(text: Iterable[str], delimiter: str) -> Iterator[CsvRow]:
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last = reader.line_num
            is_open = "unexpected end of data" in str(error)
            cut = f"a quoted field is still open where the file ends, in line {last}: a quote is missing"
            yield line, [], f"{cut}, or the file is cut off" if is_open else f"invalid CSV: {error}"
            continue
        if fields:
            yield line, fields, ""


def _read_parquet(path: Path) -> Iterator[Piece]:
    # Without these two settings a row group of any size is read at once.
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK_BYTES) as file:
        check_columns(file.schema_arrow.names, str(path))
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        num_rows = max(1, file.metadata.num_rows)
        row_bytes = sum(group.total_byte_size for group in groups) / num_rows
        batches = file.iter_batches(batch_size=max(1, min(BLOCK_ROWS, int(BLOCK_BYTES / (row_bytes + 1)))))
        size = path.stat().st_size
        for number, rows in _arrow_rows(path, batches):
            yield number, rows, size * number // num_rows


def _read_arrow(path: Path) -> Iterator[Piece]:
    """Reads a file of a Hugging Face dataset (an Arrow stream), or any other Arrow file."""
    with pa.memory_map(str(path)) as file:
        try:
            opened: Any = pa.ipc.open_stream(file)
            reader = iter(opened)
        except pa.ArrowInvalid:
            opened = pa.ipc.open_file(file)
            reader = (opened.get_batch(index) for index in range(opened.num_record_batches))
        check_columns(opened.schema.names, str(path))
        for number, rows in _arrow_rows(path, (piece for batch in reader for piece in _slices(batch))):
            yield number, rows, file.tell()


def _slices(batch: Any) -> Iterator[Any]:
    step = max(1, min(BLOCK_ROWS, int(BLOCK_BYTES * batch.num_rows / max(1, batch.nbytes))))
    return (batch.slice(start, step) for start in range(0, batch.num_rows, step))


def _arrow_rows(path: Path, batches: Iterable[Any]) -> Iterator[tuple[int, ArrowRows]]:
    """Number of the last row, and the rows, of each batch."""
    number = 0
    left = iter(batches)
    while True:
        with bounded_memory(path):
            batch = next(left, None)
            rows = None if batch is None else ArrowRows(to_stream(batch))
        if batch is None or rows is None:
            return
        if batch.num_rows:
            number += batch.num_rows
            yield number, rows


_READERS: dict[str, Reader] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json),
    **dict.fromkeys((".csv", ".tsv"), _read_csv),
    ".parquet": _read_parquet,
    **dict.fromkeys((".arrow", ".feather"), _read_arrow),
}
_COLUMNAR = (_read_parquet, _read_arrow)
_FORMATS = (
    "known: .jsonl, .ndjson, .json, .csv, .tsv (each also .gz, .zst or .bz2), .parquet, .arrow, .feather; "
    "unpack archives (.zip, .tar, .xz)"
)


def is_readable(path: Path) -> bool:
    """Whether the name of a file is that of a known format, or of an archive of such files."""
    return _reader(path) is not None or path.suffix.lower() in {".zip", ".xz"}


def _reader(path: Path) -> Reader | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in CODECS:
        inner = _READERS.get(suffixes[-2]) if len(suffixes) > 1 else None
        return None if inner in _COLUMNAR else inner
    return _READERS.get(suffixes[-1]) if suffixes else None
