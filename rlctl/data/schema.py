"""One row, in verl's layout: `data_source`, `prompt`, `ability`, `reward_model`, `extra_info`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

GSM8K_SOURCE = "openai/gsm8k"
#: The fields of `extra_info` with an Arrow column of their own; the rest is JSON text in `OTHER`.
EXTRA_COLUMNS = ("split", "index", "question", "answer")
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and how its answers are graded.

    Attributes:
        data_source: where it comes from; chooses the grader.
        prompt: the conversation so far, at least one message.
        ground_truth: what the grader compares with.
        ability: kind of task, for reports.
        style: `rule`, `model` or `code`: how it is graded.
        split: `train` or `test`.
        index: place in the original input, from 0.
        question: the original prompt text, before any instruction was added.
        answer: the original answer text, reasoning included.
        extra: `extra_info` as user functions get it, JSON-able; a row that was read has all its fields there.
        where: `file:row` it was read from, for messages; not written.
    """

    data_source: str
    prompt: tuple[Message, ...]
    ground_truth: str
    ability: str = ""
    style: str = "rule"
    split: str = ""
    index: int = 0
    question: str = ""
    answer: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def other(self) -> str:
        """The fields of `extra` without a column of their own, as JSON text; "" for none."""
        other = {name: value for name, value in self.extra.items() if name not in EXTRA_COLUMNS}
        return json.dumps(other, ensure_ascii=False, sort_keys=True) if other else ""

    def to_arrow(self, split: str) -> dict[str, Any]:
        """The nested values `arrow_schema()` describes, as a row of `split`."""
        return {
            "data_source": self.data_source,
            "prompt": [{"role": message.role, "content": message.content} for message in self.prompt],
            "ability": self.ability,
            "reward_model": {"style": self.style, "ground_truth": self.ground_truth},
            "extra_info": {
                "split": split,
                "index": self.index,
                "answer": self.answer,
                "question": self.question,
                OTHER: self.other,
            },
        }


@cache
def arrow_schema(*, with_other: bool = False) -> pa.Schema:
    """The schema of files: verl's own, field by field, so that `datasets.concatenate_datasets` takes both.

    No nulls are written. Strings have 32-bit offsets: `BatchWriter` keeps row groups far below 2 GiB.

    Args:
        with_other: `extra_info` also has the field `OTHER`.
    """
    import pyarrow as pa

    return _schema(pa.string(), with_other=with_other)


@cache
def large_schema() -> pa.Schema:
    """The same with 64-bit offsets and the field `OTHER`, for batches of any size in memory."""
    import pyarrow as pa

    return _schema(pa.large_string(), with_other=True)


def _schema(text: pa.DataType, *, with_other: bool) -> pa.Schema:
    import pyarrow as pa

    message = pa.struct([("role", text), ("content", text)])
    extra = [("split", text), ("index", pa.int64()), ("answer", text), ("question", text), (OTHER, text)]
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(message)),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct(extra if with_other else extra[:-1])),
        ]
    )
