"""First pass: transforms blocks of input to rows and their keys, and stores both on disk.

`transform` is a pure function that runs in any process. `Staging` uses a few numbers of memory per block; its
files are in the directory that becomes the output.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Self
from zlib import crc32

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlctl.data.schema import EXTRA_COLUMNS, LARGE_SCHEMA, Row, batch_of
from rlctl.prepare.blocks import Block, Record, records_of, to_stream
from rlctl.prepare.duplicates import ID_COLUMNS, column_keys, normalise, text_key
from rlctl.prepare.findings import EXAMPLES_SHOWN, Doubt, has_number, placeholder, row_doubts
from rlctl.prepare.lengths import MeasuredRow, PromptLengths
from rlctl.prepare.recipes import Recipe, columns_read

#: Keys of each row: name → type. Each key has a separate file, so that only one at a time is in memory.
KEYS: dict[str, Any] = {
    "number": np.uint64,  # line or row in the input file
    "split": np.uint64,  # hash of the question and the seed
    "exact": np.uint64,  # hash of the normalised question
    "answer": np.uint32,  # hash of the ground truth
    "columns": np.uint64,  # hash of the other columns, see `duplicates.column_keys`
    **dict.fromkeys(ID_COLUMNS, np.uint64),  # hash of each of these columns; 0 without it
    "tokens": np.int32,  # length of the rendered prompt; -1 if not measured
}


@dataclass(frozen=True, slots=True)
class TransformPlan:
    """Settings of `transform`; sent to each worker once."""

    recipe: Recipe  # resolved
    seed: int  # of the split
    lengths: PromptLengths | None = None  # measures prompts; None: prompts are not measured


@dataclass(frozen=True, slots=True)
class Transformed:
    """The result of one block."""

    num_records: int  # input rows of the block
    #: usable rows, as an Arrow IPC stream of one batch; an index below 0 is the position in the block (−1:
    #: its first record)
    rows: bytes
    keys: dict[str, Any]  # an array for each of `KEYS`
    bad: list[Record]  # unusable rows, in order, with their problems
    #: (rows,) data source and ground truth; None for placeholders, and unless `is_ruled`
    truths: list[tuple[str, str] | None]
    placeholders: dict[int, str]  # index among the usable rows → the placeholder; see `findings.placeholder`
    sources: Counter[str]  # rows with an answer per data source
    numbers: Counter[str]  # of these, rows whose answer is a number
    doubts: list[tuple[int, list[Doubt]]]  # row number and doubts, of doubtful rows
    num_bytes: int  # size of the usable rows in memory
    has_other: bool  # some rows have fields of `extra_info` without a separate column
    has_calls: bool  # some messages have fields besides role and content
    columns: dict[str, bool]  # field of `extra_info` → some row has a value

    @property
    def num_rows(self) -> int:
        """Number of usable rows."""
        return len(self.keys["number"])


def usable_rows(
    recipe: Recipe, lengths: PromptLengths | None, block: Block
) -> tuple[list[tuple[Record, MeasuredRow]], list[Record]]:
    """Reads the rows of a block with a resolved recipe and measures them; also returns the unusable ones.

    Without `lengths`, rows have −1 tokens. A row without an index of its own has −1 − its place in the block.
    """
    bad: list[Record] = []
    records: list[Record] = []
    rows: list[Row] = []
    for index, record in enumerate(records_of(block)):
        row, problem = recipe.read(record, block.source, -1 - index)
        if row is None:
            bad.append(record._replace(problem=problem))
        else:
            records.append(record)
            rows.append(row)
    measured = lengths.measure(rows) if lengths is not None else [MeasuredRow(row, -1) for row in rows]
    pairs = list(zip(records, measured, strict=True))
    bad += [record._replace(problem=measured.problem) for record, measured in pairs if measured.problem]
    return [pair for pair in pairs if not pair[1].problem], sorted(bad, key=lambda record: record.number)


def transform(plan: TransformPlan, block: Block) -> Transformed:
    """Converts the rows of a block with the recipe, checks and measures them, and computes their keys."""
    usable, bad = usable_rows(plan.recipe, plan.lengths, block)
    rows = [measured.row for _, measured in usable]
    split = (blake2b(f"{plan.seed}\n{row.question}".encode(), digest_size=8).digest() for row in rows)
    columns_of_rows = {
        "number": [record.number for record, _ in usable],
        "split": [int.from_bytes(digest, "big") for digest in split],
        "exact": [text_key(normalise(row.question)) for row in rows],
        "answer": [crc32(row.ground_truth.encode()) for row in rows],
        "tokens": [measured.num_tokens for _, measured in usable],
    }
    others = [
        column_keys(measured.row.extra, columns_read(plan.recipe, record.values or {})[1])
        for record, measured in usable
    ]
    columns_of_rows["columns"] = [columns for columns, _ in others]
    columns_of_rows |= {name: [ids[name] for _, ids in others] for name in ID_COLUMNS}
    keys = {name: np.array(values, dtype=KEYS[name]) for name, values in columns_of_rows.items()}
    batch = batch_of(rows)
    placeholders = {index: text for index, row in enumerate(rows) if (text := placeholder(row))}
    return Transformed(
        num_records=len(usable) + len(bad),
        rows=to_stream(batch, compression="lz4"),
        keys=keys,
        bad=bad,
        truths=[
            (row.data_source, row.ground_truth) if row.is_ruled and index not in placeholders else None
            for index, row in enumerate(rows)
        ],
        placeholders=placeholders,
        sources=Counter(row.data_source for row in rows if row.ground_truth),
        numbers=Counter(row.data_source for row in rows if has_number(row)),
        doubts=[
            (record.number, doubts) for record, measured in usable if (doubts := row_doubts(measured.row))
        ],
        num_bytes=batch.nbytes,
        has_other=any(row.extra.keys() - EXTRA_COLUMNS for row in rows),
        has_calls=any(row.has_calls for row in rows),
        columns=_columns(rows),
    )


def _columns(rows: Sequence[Row]) -> dict[str, bool]:
    """Field of `extra_info` → whether some row has a value that is neither null nor empty."""
    filled: dict[str, bool] = {}
    for row in rows:
        for name, value in row.extra.items():
            filled[name] = filled.get(name, False) or value not in (None, "", [], {})
    return filled


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
        index = stored.to_numpy()
        by_place = self.first_index - 1 - index  # an index of −1 is the block's first record
        return batch, pa.array(np.where(index < 0, by_place, index))

    def questions(self, is_wanted: NDArray[np.bool_]) -> list[str]:
        """The questions of the rows where `is_wanted` (num_rows,) is true."""
        questions = self._batch("extra_info").column("extra_info").field("question")
        wanted: list[str] = questions.take(pa.array(np.flatnonzero(is_wanted))).to_pylist()
        return wanted

    def _batch(self, *columns: str) -> Any:
        """The stored batch, all columns or only the given ones."""
        with self.file.open("rb") as file:
            file.seek(self.offset)
            stream = file.read(self.length)
        places = [LARGE_SCHEMA.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=places)
        return pa.ipc.open_stream(stream, options=options).read_next_batch()


class Staging:
    """Stores all transformed blocks in a working directory inside `stage`, which is removed on exit."""

    def __init__(self, stage: Path) -> None:
        self._directory = stage / ".work"
        self._files: dict[str, IO[bytes]] = {}
        self.blocks: list[StagedBlock] = []  # with usable rows, in input order
        self.num_records = 0  # input rows
        self.num_rows = 0  # usable rows
        self.has_other = False  # some rows have fields of `extra_info` without a separate column
        self.has_calls = False  # some messages have fields besides role and content
        self.columns: dict[str, bool] = {}  # field of `extra_info` → some row has a value

    def __enter__(self) -> Self:
        self._directory.mkdir()
        self._files = {name: self.file(name).open("wb") for name in ("rows", *KEYS)}
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        shutil.rmtree(self._directory, ignore_errors=True)

    def add(self, block: Block, done: Transformed) -> None:
        """Appends the rows and keys of a block."""
        rows = self._files["rows"]
        if done.num_rows:
            position = (rows.tell(), len(done.rows), self.num_rows, done.num_rows, self.num_records)
            self.blocks.append(StagedBlock(self.file("rows"), *position, block.path, done.num_bytes))
            rows.write(done.rows)
            for name, values in done.keys.items():
                self._files[name].write(np.ascontiguousarray(values).tobytes())
        self.num_records += done.num_records
        self.num_rows += done.num_rows
        self.has_other |= done.has_other
        self.has_calls |= done.has_calls
        self.columns |= {name: has or self.columns.get(name, False) for name, has in done.columns.items()}

    def finish(self) -> None:
        """Closes the files; call it after the last `add`."""
        for file in self._files.values():
            file.close()

    def file(self, name: str) -> Path:
        """Path of the file of one key."""
        return self._directory / name

    def key(self, name: str) -> NDArray[Any]:
        """One key of all rows, read from disk."""
        return np.fromfile(self.file(name), dtype=KEYS[name])

    def places(self, rows: Sequence[int] | NDArray[Any]) -> list[str]:
        """`file:row` of the first few of these staged rows."""
        places = []
        with self.file("number").open("rb") as file:
            for row in map(int, rows[:EXAMPLES_SHOWN]):
                block = self.blocks[bisect_right(self.blocks, row, key=lambda block: block.first_row) - 1]
                file.seek(8 * row)
                places.append(f"{block.source}:{int.from_bytes(file.read(8), 'little')}")
        return places

    def questions(self, is_wanted: NDArray[np.bool_]) -> Iterator[str]:
        """Yields the questions of the rows where `is_wanted` (rows,) is true, in order."""
        for block in self.blocks:
            if is_wanted[block.rows].any():
                yield from block.questions(is_wanted[block.rows])
