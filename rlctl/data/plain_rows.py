"""Rows of prepared files, read by columns: several times as fast as record by record."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from rlctl.data.records import RowError, parse_answer
from rlctl.data.schema import EXTRA_COLUMNS, LARGE_SCHEMA, OTHER, PLACE, Message, Row

_COLUMNS = tuple(LARGE_SCHEMA.names)
#: What a ground truth begins with that may be a list, see `literals.answer_in`.
_MAY_BE_LIST = frozenset("[({an")
_LONG_NUMBER = re.compile(r"\d{19}")  # orjson rounds integers of more than 64 bits


def plain_rows(batch: Any, path: Path, first_number: int) -> list[Row] | None:
    """The rows of an Arrow batch, as `records.parse_row` reads them.

    None if the batch does not have exactly the columns that `prepare-data` writes, or a row needs more than
    its values: `parse_row` then reads it or says what is wrong.

    Args:
        path: the file.
        first_number: number of the first row in it, from 1.
    """
    names = [name for name in batch.schema.names if name != PLACE]
    if tuple(names) != _COLUMNS or any(batch.column(name).null_count for name in names):
        return None
    with suppress(ValueError, OverflowError, KeyError, RowError, pa.ArrowException):
        return list(_rows(batch, path, first_number))
    return None


def _rows(batch: Any, path: Path, first_number: int) -> Iterator[Row]:
    """Raises a ValueError or KeyError where `parse_row` must read the batch."""
    reward_model = batch.column("reward_model")
    extra_info = batch.column("extra_info")
    fields = [field.name for field in extra_info.type]
    if [name for name in fields if name != OTHER] != ["split", "index", "answer", "question"]:
        raise ValueError("other fields of extra_info")
    others = _texts(extra_info.field(OTHER)) if OTHER in fields else [""] * len(batch)
    has_places = PLACE in batch.schema.names
    places = batch.column(PLACE).to_pylist() if has_places else [None] * len(batch)
    columns = zip(
        _texts(batch.column("data_source")),
        _prompts(batch.column("prompt")),
        _texts(batch.column("ability")),
        _texts(reward_model.field("style")),
        _texts(reward_model.field("ground_truth")),
        _texts(extra_info.field("split")),
        _integers(extra_info.field("index")),
        _texts(extra_info.field("answer")),
        _texts(extra_info.field("question")),
        others,
        places,
        strict=True,
    )
    for number, columns_of_row in enumerate(columns, first_number):
        source, prompt, ability, style, truth, split, index, answer, question, other, place = columns_of_row
        if not source.strip():
            raise ValueError("no data source")
        stripped = truth.strip()
        if not stripped:
            truth = ""
        elif stripped[0] in _MAY_BE_LIST:
            truth = parse_answer(truth, "reward_model.ground_truth")
        extra = {"split": split, "index": index, "answer": answer, "question": question}
        if other:
            extra |= _fields(other)
        yield Row(
            data_source=source,
            prompt=prompt,
            ground_truth=truth,
            ability=ability,
            style=style or "rule",
            split=split,
            index=index,
            question=question,
            answer=answer,
            extra=extra,
            where=place or f"{path}:{number}",
        )


def _values(column: Any) -> list[Any]:
    if column.null_count:
        raise ValueError("null")
    values: list[Any] = column.to_pylist()
    return values


def _integers(column: Any) -> list[int]:
    if not pa.types.is_integer(column.type):
        raise ValueError("no integer")
    return _values(column)


def _texts(column: Any) -> list[str]:
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise ValueError("no text")
    return _values(column)


def _prompts(column: Any) -> Iterator[tuple[Message, ...]]:
    """Each row's messages; none may have tool calls, and none of the assistant may be the last."""
    messages = column.flatten()
    if messages.null_count or column.type.value_type.field(0).name != "role":
        raise ValueError("no messages")
    roles = _texts(messages.field("role"))
    contents = _texts(messages.field("content"))
    if messages.type.num_fields > 2 and any(_values(messages.field(OTHER))):
        raise ValueError("fields besides role and content")
    if not all(roles) or any(map(str.isspace, contents)) or not all(contents):
        raise ValueError("an empty message")
    start = 0
    for size in column.value_lengths().to_pylist():
        prompt = tuple(map(Message, roles[start : start + size], contents[start : start + size]))
        if not prompt or prompt[-1].role == "assistant":
            raise ValueError("no question")
        start += size
        yield prompt


def _fields(text: str) -> dict[str, Any]:
    """The fields that are stored as JSON text; none may be one of the others."""
    fields = json.loads(text) if _LONG_NUMBER.search(text) else orjson.loads(text)
    if not isinstance(fields, dict) or not fields.keys().isdisjoint(EXTRA_COLUMNS):
        raise ValueError("other fields")
    return fields
