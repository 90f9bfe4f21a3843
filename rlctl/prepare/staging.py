"""Temporary storage of rows and keys on disk, in the directory that becomes the output.

Memory use is a few numbers per block.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlctl.data.blocks import Block
from rlctl.data.schema import integers, large_schema
from rlctl.prepare.findings import EXAMPLES_SHOWN
from rlctl.prepare.transform import Transformed


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """Location of the rows of one block."""

    file: Path  # file of Arrow IPC streams
    #: offset, length: position of the block's stream in `file`, in bytes
    offset: int
    length: int
    first_row: int  # index of its first row among all staged rows
    num_rows: int  # number of its staged rows
    first_index: int  # number of input records before the block
    source: Path  # the input file
    num_bytes: int  # size of its rows in memory

    @property
    def rows(self) -> slice:
        """Slice of its rows among all staged rows."""
        return slice(self.first_row, self.first_row + self.num_rows)

    def read(self) -> tuple[Any, Any]:
        """The rows as an Arrow record batch, and their final indices."""
        batch = self._batch()
        stored = batch.column("extra_info").field("index")
        index = np.frombuffer(stored.buffers()[1], np.int64, len(stored))  # `to_numpy` imports pandas
        by_place = self.first_index - 1 - index  # an index of −1 is the block's first record
        return batch, integers(np.where(index < 0, by_place, index), pa.int64())

    def questions(self, is_wanted: NDArray[np.bool_]) -> list[str]:
        """The questions of the rows where `is_wanted` (num_rows,) is true."""
        questions = self._batch("extra_info").column("extra_info").field("question")
        wanted: list[str] = questions.take(integers(np.flatnonzero(is_wanted), pa.int64())).to_pylist()
        return wanted

    def _batch(self, *columns: str) -> Any:
        """The stored batch, all columns or only the given ones."""
        with self.file.open("rb") as file:
            file.seek(self.offset)
            stream = file.read(self.length)
        places = [large_schema().get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=places)
        return pa.ipc.open_stream(stream, options=options).read_next_batch()


class Staging:
    """Stores all transformed blocks in a working directory inside `stage`, which is removed on exit.

    `keys`: name → NumPy type of the keys of each row.
    """

    def __init__(self, stage: Path, keys: Mapping[str, Any]) -> None:
        self._directory, self._types = stage / ".work", keys
        self._files: dict[str, IO[bytes]] = {}
        self.blocks: list[StagedBlock] = []  # with usable rows, in input order
        self.num_records = 0  # input rows
        self.num_rows = 0  # usable rows
        self.has_other = False  # some rows have fields of `extra_info` without a separate column

    def __enter__(self) -> Self:
        self._directory.mkdir()
        self._files = {name: self.file(name).open("wb") for name in ("rows", *self._types)}
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        shutil.rmtree(self._directory, ignore_errors=True)

    def add(self, block: Block, done: Transformed) -> None:
        """Appends the rows and keys of a block."""
        rows = self._files["rows"]
        if done.num_rows:
            place = (rows.tell(), len(done.rows), self.num_rows, done.num_rows, self.num_records)
            self.blocks.append(StagedBlock(self.file("rows"), *place, block.path, done.num_bytes))
            rows.write(done.rows)
            for name, values in done.keys.items():
                self._files[name].write(np.ascontiguousarray(values).tobytes())
        self.num_records += done.num_records
        self.num_rows += done.num_rows
        self.has_other |= done.has_other

    def finish(self) -> None:
        """Closes the files; call it after the last `add`."""
        for file in self._files.values():
            file.close()

    def file(self, name: str) -> Path:
        """Path of the file of one key."""
        return self._directory / name

    def key(self, name: str) -> NDArray[Any]:
        """One key of all rows, read from disk."""
        return np.fromfile(self.file(name), dtype=self._types[name])

    def places(self, rows: Sequence[int] | NDArray[Any]) -> list[str]:
        """`file:row` of the first few of these staged rows."""
        found = []
        with self.file("number").open("rb") as file:
            for row in map(int, rows[:EXAMPLES_SHOWN]):
                block = self.blocks[bisect_right(self.blocks, row, key=lambda block: block.first_row) - 1]
                file.seek(8 * row)
                found.append(f"{block.source}:{int.from_bytes(file.read(8), 'little')}")
        return found

    def questions(self, is_wanted: NDArray[np.bool_]) -> Iterator[str]:
        """Yields the questions of the rows where `is_wanted` (rows,) is true, in order."""
        for block in self.blocks:
            if is_wanted[block.rows].any():
                yield from block.questions(is_wanted[block.rows])
