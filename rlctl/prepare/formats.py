"""Prepared rows as other frameworks read them.

verl's `RLHFDataset` takes the columns as they are. TRL's GRPO trainer takes `prompt` and hands every
other column to the reward functions by name; its own `accuracy_reward` wants `solution`. OpenRLHF's
`PromptDataset` takes the columns named by its input key (`input`) and label key, and `datasource`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

from rlctl.data.schema import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

Format = Literal["verl", "trl", "openrlhf"]

#: format → its column ← where it is in verl's layout, a dot reaching inside
_COLUMNS: dict[Format, dict[str, str]] = {
    "verl": {name: name for name in ("data_source", "prompt", "ability", "reward_model", "extra_info")},
    "trl": {
        "prompt": "prompt",
        "solution": "reward_model.ground_truth",
        "ground_truth": "reward_model.ground_truth",
        "data_source": "data_source",
        "ability": "ability",
        "style": "reward_model.style",
        "extra_info": "extra_info",
    },
    "openrlhf": {
        "input": "prompt",
        "label": "reward_model.ground_truth",
        "datasource": "data_source",
    },
}


@cache
def schema(to: Format, *, with_other: bool) -> pa.Schema:
    """The Arrow schema of a format's files; `with_other` as of `arrow_schema`."""
    import pyarrow as pa

    rows = arrow_schema(with_other=with_other)
    return pa.schema([(name, _type(rows, place)) for name, place in _COLUMNS[to].items()])


def convert(batch: pa.RecordBatch, to: Format) -> pa.RecordBatch:
    """A batch of `large_schema()` with another format's columns; no text is copied."""
    import pyarrow as pa

    columns = [_column(batch, place) for place in _COLUMNS[to].values()]
    return pa.RecordBatch.from_arrays(columns, names=list(_COLUMNS[to]))


def _type(rows: pa.Schema, place: str) -> pa.DataType:
    column, _, inside = place.partition(".")
    found = rows.field(column).type
    return found.field(inside).type if inside else found


def _column(batch: pa.RecordBatch, place: str) -> pa.Array:
    column, _, inside = place.partition(".")
    found = batch.column(column)
    return found.flatten()[found.type.get_field_index(inside)] if inside else found
