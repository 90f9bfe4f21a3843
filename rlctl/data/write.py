"""Parquet files and the directory around them: there completely, or not at all."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from rlctl.data.schema import Row, arrow_schema
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.files import sync

ROW_GROUP_ROWS = 8192
ROW_GROUP_CHARS = 32 << 20


class RowWriter:
    """One split's Parquet file, written a row group at a time; no file if no row comes."""

    def __init__(self, path: Path, split: str) -> None:
        self._path = path
        self._split = split
        self._writer: Any = None
        self._pending: list[dict[str, Any]] = []
        self._pending_chars = 0
        self.num_rows = 0

    def add(self, row: Row) -> None:
        """Append a row."""
        self._pending.append(row.to_arrow(self._split))
        self._pending_chars += len(row.question) + len(row.answer) + sum(len(m.content) for m in row.prompt)
        self.num_rows += 1
        if len(self._pending) >= ROW_GROUP_ROWS or self._pending_chars >= ROW_GROUP_CHARS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, arrow_schema(), compression="zstd")
        self._writer.write_batch(pa.RecordBatch.from_pylist(self._pending, schema=arrow_schema()))
        self._pending = []
        self._pending_chars = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._pending:
            self._flush()
        if self._writer is not None:
            self._writer.close()


@contextmanager
def staged_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that takes its name when the block ends well, and vanishes when it does not.

    A previous `out` is replaced; whether it may be is the caller's business.

    Raises:
        UsageError: the place lies below a file.
        EnvironmentFailure: the disk is full, or the place cannot be written to.
    """
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        stage = _beside(out, "partial")
        stage.mkdir()
        try:
            yield stage
            _publish(stage, out)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except (FileExistsError, NotADirectoryError) as error:
        what = "the output lies below a file, or its place was taken meanwhile"
        raise UsageError(what, where=str(out), fix="choose another --out") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentFailure(
            f"the output cannot be written: {reason}",
            where=str(out),
            fix="free disk space or choose another --out",
        ) from error


def clear_leftovers(out: Path) -> None:
    """Remove what a killed process left; put a directory back that was killed while being replaced."""
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
    """Refuse to write where anything is already.

    Raises:
        UsageError: `out` is a file, or a directory that is not empty.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        what = "the directory is not empty" if out.is_dir() else "the output is a file, not a directory"
        raise UsageError(what, where=str(out), fix="choose another --out")


def _publish(stage: Path, out: Path) -> None:
    for file in [*stage.iterdir(), stage]:
        sync(file)
    old = _beside(out, "old")
    if out.exists():
        out.rename(old)
    stage.rename(out)
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _beside(out: Path, kind: str) -> Path:
    return out.parent / f".{out.name}.{kind}-{os.getpid()}"
