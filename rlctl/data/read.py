"""Reads prepared Parquet files into rows, for training and evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlctl.data.plain_rows import plain_rows
from rlctl.data.records import RowError, check_columns, check_last_turn, parse_row
from rlctl.data.schema import PLACE, Row
from rlctl.errors import UsageError, first_line
from rlctl.files import matches
from rlctl.processes import few_collections

REQUIRED = ("data_source", "prompt", "reward_model")
_ANSWERS = {"answer", "solution", "ground_truth", "label"}
#: Splits held out from training, in names of directories and files such as `test-00000-of-00004.parquet`.
_HELD_OUT = {"test", "val", "valid", "validation", "dev", "eval"}
SPLIT_NAME = re.compile(rf"(train|{'|'.join(sorted(_HELD_OUT))})(?![a-z])", re.IGNORECASE)
PREPARE = "write it with `rlctl prepare-data parquet`"


def load_rows(
    files: Sequence[str], *, continue_final_message: bool = False, most: int | None = None
) -> list[Row]:
    """Reads the rows of Parquet files (or directories of them) in verl's row schema, in order.

    Columns that are not in the schema become fields of `extra_info`, of which all are kept. A `prompt` that
    is plain text is one user message. So verl's files work unchanged. A row may lack a ground truth: whether
    one is needed depends on the reward. With `continue_final_message` a prompt may end with the beginning of
    the response, as a message of the assistant. `most` stops after so many rows.

    Raises:
        UsageError: a file is missing, broken or empty, or a row does not match the schema; names file and
            row.
    """
    with few_collections():
        return _loaded(files, continue_final_message, most)


def _loaded(files: Sequence[str], continue_final_message: bool, most: int | None) -> list[Row]:
    rows: list[Row] = []
    for path in _parquet_files(files):
        with _opened(path) as file:
            for number, batch in batches_of(file, path):
                if most is not None and len(rows) >= most:
                    return rows[:most]
                plain = plain_rows(batch, path, number)
                if plain is None:
                    plain = [
                        _row(path, at, values, continue_final_message)
                        for at, values in _numbered(batch, path, number)
                    ]
                rows += plain
    return rows[:most]


def check_files(files: Sequence[str]) -> int:
    """Checks the footers of Parquet files: they exist, and have rows and the required columns.

    Returns the number of rows.

    Raises:
        UsageError: as `load_rows`, except for errors in the rows.
    """
    count = 0
    for path in _parquet_files(files):
        with _opened(path) as file:
            count += file.metadata.num_rows
    return count


def check_batch_size(num_rows: int, batch_size: int, more: str = "") -> None:
    """Checks that no batch needs a row twice; `more` describes rows that are not counted.

    Raises:
        UsageError: a batch is larger than the data.
    """
    if num_rows < batch_size:
        raise UsageError(
            f"a batch takes {batch_size} prompts, the data has {num_rows}{more}",
            where="data.train_batch_size",
            fix=f"lower data.train_batch_size to {num_rows} or less, or add data",
        )


def _parquet_files(files: Sequence[str]) -> Iterator[Path]:
    for name in files:
        matching = matches(name)
        if not matching:
            raise UsageError("no such file or directory", where=name, fix=PREPARE)
        for path in matching:
            yield from _inside(path) if path.is_dir() else [path]


def _inside(directory: Path) -> list[Path]:
    paths = sorted(directory.glob("*.parquet"))
    if not paths:
        raise UsageError("the directory holds no .parquet file", where=str(directory), fix=PREPARE)
    check_splits(directory, paths)
    return paths


def check_splits(directory: Path, entries: Iterable[Path]) -> None:
    """Refuses to read training data together with data held out from training.

    Raises:
        UsageError: some names start with `train`, and others with `test`, `validation` or similar.
    """
    by_split: dict[str, str] = {}
    for entry in entries:
        if entry.is_dir() and entry.name != "train" and entry.name not in _HELD_OUT:
            continue
        split = SPLIT_NAME.match(entry.name)
        if split:
            is_whole = entry.is_dir() or entry.name.partition(".")[0] == split[1]
            by_split.setdefault(split[1].lower(), entry.name if is_whole else f"{split[1]}*")
    if "train" in by_split and _HELD_OUT & set(by_split):
        fix = f"name {' or '.join(str(directory / name) for name in by_split.values())}"
        message = f"the directory has the splits {', '.join(by_split)}: reading all of them would mix them"
        raise UsageError(message, where=str(directory), fix=fix)


def parquet_names(path: Path) -> list[str] | None:
    """Names of the columns of a Parquet file; None if it cannot be read."""
    try:
        names: list[str] = pq.read_schema(path).names
    except (pa.ArrowException, OSError):
        return None
    return names


def is_row_schema(names: Sequence[str]) -> bool:
    """Whether the columns are those of the row schema, perhaps with some missing."""
    known = {"data_source", "prompt"} <= set(names) and not _ANSWERS & set(names)
    return known or "reward_model" in names


def _opened(path: Path) -> Any:
    file = open_parquet(path, REQUIRED, fix="convert it with `rlctl prepare-data parquet`")
    if not file.metadata.num_rows:
        raise UsageError("the file has no rows", where=str(path), fix=PREPARE)
    return file


def open_parquet(path: Path, required: Sequence[str], *, fix: str) -> Any:
    """Opens a Parquet file that must have the columns `required`.

    Raises:
        UsageError: the file cannot be read, or a column is missing; the latter suggests `fix`.
    """
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, 1, error) from error
    check_columns(names, str(path))
    missing = [name for name in required if name not in names]
    if missing:
        message = f"column{'s' if len(missing) > 1 else ''} {', '.join(missing)} missing"
        raise UsageError(f"{message} (it has {', '.join(names)})", where=str(path), fix=fix)
    return file


def rows_of(file: Any, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number, from 1, and the values of each row.

    Raises:
        UsageError: the rest of the file cannot be read.
    """
    for number, batch in batches_of(file, path):
        yield from _numbered(batch, path, number)


def batches_of(file: Any, path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the number of the first row, from 1, and a batch of rows.

    Raises:
        UsageError: the rest of the file cannot be read.
    """
    number = 1
    try:
        for batch in file.iter_batches(batch_size=4096):
            yield number, batch
            number += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, number, error) from error


def _numbered(batch: Any, path: Path, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the values of each row of a batch."""
    for number, values in enumerate(python_rows(batch), first):
        if isinstance(values, Exception):
            raise _unreadable(path, number, values)
        yield number, values


def python_rows(table: Any) -> Iterator[dict[str, Any] | Exception]:
    """Each row of an Arrow table or batch; the error for one with text or a date that Python cannot hold."""
    try:
        yield from table.to_pylist()
    except (ValueError, OverflowError) as error:
        if table.num_rows == 1:
            yield error
        else:
            for row in range(table.num_rows):
                yield from python_rows(table.slice(row, 1))


def _unreadable(path: Path, number: int, error: Exception) -> UsageError:
    return UsageError(f"cannot be read as Parquet: {first_line(error)}", where=f"{path}:{number}")


def _row(path: Path, number: int, values: Mapping[str, Any], continue_final_message: bool) -> Row:
    where = values.get(PLACE) or f"{path}:{number}"
    try:
        row = parse_row(values, number=number - 1, where=where)
        check_last_turn(row.prompt, continue_final_message=continue_final_message)
    except RowError as problem:
        raise UsageError(str(problem), where=where, fix="correct or remove this row") from None
    return row
