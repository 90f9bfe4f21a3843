"""Rows in verl's layout (`data_source`, `prompt`, `ability`, `reward_model`, `extra_info`), files of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

#: Fields of `extra_info` with a separate Arrow column; the others are stored as JSON text in `OTHER`.
EXTRA_COLUMNS = ("split", "index", "question", "answer")
OTHER = "other"
#: Column of prepared files in the cache: `file:row` of the origin, for messages.
PLACE = "rlctl_place"
ROW_GROUP_ROWS = 16384
ROW_GROUP_BYTES = 32 << 20
#: Columns with repeated values. For the other columns, which are long texts, dictionaries and statistics
#: would take half of the writing time and save nothing.
_REPETITIVE = [
    *("data_source", "datasource", "ability", "style", "prompt.list.element.role", "input.list.element.role"),
    *("reward_model.style", "extra_info.split", "extra_info.index"),
]


def json_text(value: Any) -> str:
    """JSON with sorted keys; several times as fast as the module json for most values."""
    try:
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:  # numbers of more than 64 bits
        text = "null"
    if "null" not in text:  # which orjson writes for NaN, too
        return text
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the prompt."""

    role: str
    content: str
    #: further fields that chat templates read (`tool_calls`, `tool_call_id`, `name`), as JSON text
    other: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        more: dict[str, Any] = json.loads(self.other) if self.other else {}
        return {"role": self.role, "content": self.content, **more}


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and the information to grade its responses."""

    data_source: str  # name of the data set; selects the grader
    prompt: tuple[Message, ...]  # the conversation so far, at least one message
    ground_truth: str  # what the grader compares with
    ability: str = ""  # kind of task, for reports
    style: str = "rule"  # `rule`, `model` or `code`: how it is graded
    split: str = ""  # `train` or `test`
    index: int = 0  # position in the original input, from 0
    question: str = ""  # the original prompt text, before any instruction was added
    answer: str = ""  # the original answer text, reasoning included
    #: `extra_info` for user functions, as JSON types; for a row read from Parquet it has all fields
    extra: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""  # `file:row` of its origin, for messages; not written

    @property
    def prompt_text(self) -> str:
        """The messages without their roles, separated by empty lines; tool calls as JSON text."""
        return "\n\n".join(message.content or message.other for message in self.prompt)

    @property
    def has_calls(self) -> bool:
        """Whether messages have fields besides role and content."""
        return any(message.other for message in self.prompt)

    @property
    def environment(self) -> str:
        """The environment that the row chooses among those of the spec; "": the spec's."""
        return str(self.extra.get("environment") or "")

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of tools that the policy reads with the prompt."""
        tools = self.extra.get("tools")
        is_list = isinstance(tools, list) and all(
            isinstance(tool, dict) and "function" in tool for tool in tools
        )
        return list(tools) if tools and is_list else []

    @property
    def stored_extra(self) -> dict[str, Any]:
        """`extra_info` as a file has it: graders get the same fields of a row that was never written."""
        stored = {"split": self.split, "index": self.index, "question": self.question, "answer": self.answer}
        return {**self.extra, **stored}

    @property
    def is_ruled(self) -> bool:
        """Whether a grader compares responses with the ground truth; true for unknown styles (DAPO-Math)."""
        return self.style not in {"model", "code"}

    @property
    def other(self) -> str:
        """The fields of `extra` without a separate column, as JSON text; "" if there are none."""
        other = {name: value for name, value in self.extra.items() if name not in EXTRA_COLUMNS}
        return json_text(other) if other else ""


@cache
def arrow_schema(
    *,
    with_other: bool = False,
    is_large: bool = False,
    with_calls: bool = False,
    with_places: bool = False,
) -> pa.Schema:
    """Schema of the files: verl's, field by field, so that `datasets.concatenate_datasets` accepts both.

    No nulls are written. Strings have 32-bit offsets, because `BatchWriter` keeps row groups far below 2 GiB;
    with `is_large` they have 64-bit offsets. With `with_other`, `extra_info` also has the field `OTHER`; with
    `with_calls`, messages have it; with `with_places`, there is a column `PLACE`.
    """
    text = pa.large_string() if is_large else pa.string()
    message = pa.struct([("role", text), ("content", text), *([(OTHER, text)] if with_calls else [])])
    extra = [("split", text), ("index", pa.int64()), ("answer", text), ("question", text), (OTHER, text)]
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(message)),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct(extra if with_other else extra[:-1])),
            *([(PLACE, text)] if with_places else []),
        ]
    )


#: For batches of any size in memory.
LARGE_SCHEMA = arrow_schema(with_other=True, is_large=True, with_calls=True)


def batch_of(rows: Sequence[Row], split: str | None = None) -> Any:
    """Converts rows to an Arrow record batch of `LARGE_SCHEMA`; sets their split, unless it is None."""
    text = pa.large_string()
    messages = [message for row in rows for message in row.prompt]
    columns = {
        "data_source": pa.array([row.data_source for row in rows], text),
        "prompt": _lists_of(
            [len(row.prompt) for row in rows],
            {
                "role": pa.array([message.role for message in messages], text),
                "content": pa.array([message.content for message in messages], text),
                OTHER: pa.array([message.other for message in messages], text),
            },
        ),
        "ability": pa.array([row.ability for row in rows], text),
        "reward_model": _structs_of(
            {
                "style": pa.array([row.style for row in rows], text),
                "ground_truth": pa.array([row.ground_truth for row in rows], text),
            }
        ),
        "extra_info": _structs_of(
            {
                "split": pa.array([row.split if split is None else split for row in rows], text),
                "index": pa.array([row.index for row in rows], pa.int64()),
                "answer": pa.array([row.answer for row in rows], text),
                "question": pa.array([row.question for row in rows], text),
                OTHER: pa.array([row.other for row in rows], text),
            }
        ),
    }
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=LARGE_SCHEMA)


def _structs_of(columns: Mapping[str, Any]) -> Any:
    return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))


def _lists_of(sizes: Sequence[int], columns: Mapping[str, Any]) -> Any:
    offsets = pa.array([0, *accumulate(sizes)], pa.int32())
    return pa.ListArray.from_arrays(offsets, _structs_of(columns))


def placed(batch: Any, split: str, index: Any) -> Any:
    """Returns the batch with every row's `split` and `index` replaced."""
    schema = LARGE_SCHEMA
    position = schema.get_field_index("extra_info")
    extra = batch.column(position)
    _, _, *others = extra.flatten()
    fields = [pa.repeat(pa.scalar(split, pa.large_string()), len(batch)), index, *others]
    placed_extra = pa.StructArray.from_arrays(fields, fields=list(extra.type))
    return batch.set_column(position, schema.field(position), placed_extra)


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
            everything = pa.array(range(batch.num_rows))
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
        self._pending = []
        self._pending_rows = 0
        self._pending_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._pending_rows:
            self._flush()
        if self._writer is not None:
            self._writer.close()


def write_rows(path: Path, split: str, rows: Sequence[Row]) -> None:
    """Writes rows of one split as a Parquet file in the row schema; creates no file without rows."""
    schema = arrow_schema(
        with_other=any(row.other for row in rows), with_calls=any(row.has_calls for row in rows)
    )
    with BatchWriter(path, schema) as batches:
        for start in range(0, len(rows), ROW_GROUP_ROWS):
            batches.add(batch_of(rows[start : start + ROW_GROUP_ROWS], split))
