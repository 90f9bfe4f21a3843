"""Rows as Arrow batches, column by column: no dictionary per row, and no guessing of types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlctl.data.schema import Row, large_schema


def batch_of(rows: Sequence[Row], split: str | None = None) -> Any:
    """An Arrow record batch of `large_schema()`.

    Args:
        rows: what to lay out.
        split: of all of them; None: each row's own.
    """
    import pyarrow as pa

    schema = large_schema()
    splits = (row.split for row in rows) if split is None else [split] * len(rows)
    reward_model = [_text(row.style for row in rows), _text(row.ground_truth for row in rows)]
    extra = [
        _text(splits),
        integers([row.index for row in rows], pa.int64()),
        _text(row.answer for row in rows),
        _text(row.question for row in rows),
        _text(row.other for row in rows),
    ]
    columns = {
        "data_source": _text(row.data_source for row in rows),
        "prompt": _prompts(rows, schema.field("prompt").type),
        "ability": _text(row.ability for row in rows),
        "reward_model": _struct(reward_model, schema.field("reward_model").type),
        "extra_info": _struct(extra, schema.field("extra_info").type),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def placed(batch: Any, split: str, index: Any) -> Any:
    """The batch with every row's `split` and `index` replaced."""
    import pyarrow as pa

    schema = large_schema()
    place = schema.get_field_index("extra_info")
    extra = batch.column(place)
    fields = dict(zip((field.name for field in extra.type), extra.flatten(), strict=True))
    fields |= {"split": pa.repeat(_text([split])[0], len(batch)), "index": index}
    return batch.set_column(place, schema.field(place), _struct(list(fields.values()), extra.type))


def _prompts(rows: Sequence[Row], kind: Any) -> Any:
    import pyarrow as pa

    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(row.prompt))
    messages = [message for row in rows for message in row.prompt]
    turns = [_text(message.role for message in messages), _text(message.content for message in messages)]
    offsets = integers(ends, pa.int32())
    return pa.ListArray.from_arrays(offsets, _struct(turns, kind.value_type), type=kind)


# `pa.array` imports pandas where it is installed, which takes longer than the rows of a small input.
def _text(values: Iterable[str]) -> Any:
    import pyarrow as pa

    encoded = [value.encode() for value in values]
    ends = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string(), len(encoded), buffers)


def integers(values: Any, kind: Any) -> Any:
    """An Arrow array of this type from numbers or a numpy array."""
    import pyarrow as pa

    content = np.array(values, dtype=kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(content), [None, pa.py_buffer(content)])


def _struct(columns: Sequence[Any], kind: Any) -> Any:
    import pyarrow as pa

    return pa.StructArray.from_arrays(columns, fields=list(kind))
