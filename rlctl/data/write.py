"""Writes Parquet files, and directories that appear complete or not at all."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from rlctl.data.schema import Row, arrow_schema, batch_of, integers
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.files import sync

ROW_GROUP_ROWS = 16384
ROW_GROUP_BYTES = 32 << 20
#: Columns with repeated values. For the other columns, which are long texts, dictionaries and statistics
#: would take half of the writing time and save nothing.
_REPETITIVE = [
    *("data_source", "datasource", "ability", "style", "prompt.list.element.role", "input.list.element.role"),
    *("reward_model.style", "extra_info.split", "extra_info.index"),
]


class BatchWriter:
    """Writes one Parquet file, a row group at a time; creates no file without rows."""

    def __init__(self, path: Path, schema: Any) -> None:
        self._path = path
        self._schema = schema
        self._writer: Any = None
        self._pending: list[Any] = []
        self._pending_rows = 0
        self._pending_bytes = 0

    def add(self, batch: Any) -> None:
        """Appends an Arrow record batch with columns that can be cast to the file's; splits large batches.

        Fields of a struct that the file's schema lacks are dropped.
        """
        if batch.nbytes > ROW_GROUP_BYTES and batch.num_rows > 1:
            half = batch.num_rows // 2
            self.add(batch.slice(0, half))
            self.add(batch.slice(half))
            return
        try:
            self._pending.append(batch.cast(self._schema))
        except pa.ArrowInvalid:  # the slice's text starts beyond 2 GiB of its batch; a copy starts at 0
            everything = integers(np.arange(batch.num_rows), pa.int64())
            self._pending.append(batch.take(everything).cast(self._schema))
        self._pending_rows += batch.num_rows
        self._pending_bytes += batch.nbytes
        if self._pending_rows >= ROW_GROUP_ROWS or self._pending_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._writer is None:
            options = {"use_dictionary": _REPETITIVE, "write_statistics": _REPETITIVE}
            self._writer = pq.ParquetWriter(self._path, self._schema, compression="zstd", **options)
        table = pa.Table.from_batches(self._pending, schema=self._schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._pending_rows:
            self._flush()
        if self._writer is not None:
            self._writer.close()


def write_rows(path: Path, split: str, rows: Sequence[Row]) -> None:
    """Writes rows of one split as a Parquet file in the row schema; creates no file without rows."""
    with BatchWriter(path, arrow_schema(with_other=any(row.other for row in rows))) as batches:
        for start in range(0, len(rows), ROW_GROUP_ROWS):
            batches.add(batch_of(rows[start : start + ROW_GROUP_ROWS], split))


@contextmanager
def staged_directory(out: Path) -> Iterator[Path]:
    """Yields a directory next to `out` that is renamed to `out` if the block succeeds, and removed if not.

    An existing `out` is replaced; the caller must check whether it may be.

    Raises:
        UsageError: a parent of `out` is a file, or another process created `out`.
        EnvironmentFailure: the disk is full, or the location is not writable.
    """
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        stage, old = (out.parent / f".{out.name}.{kind}-{os.getpid()}" for kind in ("partial", "old"))
        stage.mkdir()
        try:
            yield stage
            for file in [*stage.iterdir(), stage]:
                sync(file)
            if out.exists():
                out.rename(old)
            stage.rename(out)
            sync(out.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except (FileExistsError, NotADirectoryError) as error:
        what = "a parent of the output is a file, or another process created the output meanwhile"
        raise UsageError(what, where=str(out), fix="choose another --out") from error
    except OSError as error:
        raise EnvironmentFailure(
            f"the output cannot be written: {error.strerror or error}",
            where=str(out),
            fix="free disk space or choose another --out",
        ) from error


def clear_leftovers(out: Path) -> None:
    """Removes leftovers of killed processes; restores `out` if a process was killed while replacing it."""
    out = out.resolve()
    for kind in ("old", "partial"):
        for left in out.parent.glob(f".{glob.escape(out.name)}.{kind}-*"):
            pid = left.name.rpartition("-")[2]
            if pid.isdecimal() and int(pid) != os.getpid() and psutil.pid_exists(int(pid)):
                continue
            if kind == "old" and not out.exists():
                left.rename(out)
            else:
                shutil.rmtree(left)


def check_vacant(out: Path) -> None:
    """Refuses to write to a location that is not empty.

    Raises:
        UsageError: `out` is a file, or a directory that is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "the directory is not empty" if out.is_dir() else "the output is a file, not a directory"
        raise UsageError(what, where=str(out), fix="choose another --out")
