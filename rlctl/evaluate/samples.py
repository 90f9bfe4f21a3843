"""Responses to questions with their grades; stored in `samples.parquet`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlctl.data.prompts import messages_of
from rlctl.data.schema import Row
from rlctl.errors import UsageError, first_line
from rlctl.files import encodable

SAMPLES_FILE = "samples.parquet"

#: (question index in the data, sample index of the response), both from 0.
Pair = tuple[int, int]
#: Columns stored as JSON text, because their structure depends on the data.
_AS_JSON = ("messages", "extra_info")


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One response to one question."""

    question_index: int  # index of the question, from 0
    sample_index: int  # 0 … n − 1
    data_source: str  # data source of the question
    prompt: str  # rendered as the model reads it
    response: str  # text of the response
    ground_truth: str  # reference that the grader compares with
    truncated: bool  # cut off at the length limit
    num_tokens: int  # response tokens, including the end of sequence
    #: the question as a conversation, before the chat template; () if unknown
    messages: Sequence[Mapping[str, str]] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)  # extra fields of the data, for graders
    reward: float | None = None  # None before grading and if the grader failed
    #: extracted answer, for majority votes; None: no answer, or the reward extracts none
    answer: str | None = None
    environment_reward: float | None = None  # of the environment itself; None: it gives none


@dataclass(frozen=True, slots=True)
class Response:
    """Response of a model."""

    text: str
    truncated: bool  # cut off at the length limit
    num_tokens: int
    reward: float | None = None  # of the environment itself; None: it gives none


def as_samples(
    rows: Sequence[Row], prompts: Sequence[str], responses: Mapping[Pair, Response]
) -> list[EvalSample]:
    """Ungraded samples, in the order of `responses`.

    `prompts` (rendered) and the question indices of `responses` refer to `rows`.
    """
    return [
        EvalSample(
            question_index=question,
            sample_index=sample,
            data_source=rows[question].data_source,
            prompt=prompts[question],
            response=response.text,
            ground_truth=rows[question].ground_truth,
            truncated=response.truncated,
            num_tokens=response.num_tokens,
            messages=messages_of(rows[question]),
            extra_info=rows[question].extra,
            environment_reward=response.reward,
        )
        for (question, sample), response in responses.items()
    ]


_TYPES = {"question_index": pa.int64(), "sample_index": pa.int64(), "num_tokens": pa.int64()}
_TYPES |= {"truncated": pa.bool_(), "reward": pa.float64(), "environment_reward": pa.float64()}
_MAY_BE_NONE = {"reward", "answer", "environment_reward"}
#: The fields of `EvalSample`, one row per response; responses to one question are adjacent.
SCHEMA = pa.schema(
    [
        pa.field(each.name, _TYPES.get(each.name, pa.large_string()), each.name in _MAY_BE_NONE)
        for each in fields(EvalSample)
    ],
    metadata={"rlctl.samples": "2"},
)


def write_samples(path: Path, samples: Sequence[EvalSample]) -> None:
    """Writes samples as Parquet."""
    table = pa.Table.from_pylist([_row(sample) for sample in samples], schema=SCHEMA)
    pq.write_table(table, path, compression="zstd")


def read_samples(path: Path) -> list[EvalSample]:
    """Reads a file of `write_samples`.

    Raises:
        UsageError: the file cannot be read or has other columns.
    """
    try:
        table = pq.read_table(path)
        missing = [name for name in SCHEMA.names if name not in table.column_names]
        if missing:
            raise UsageError(
                f"not an evaluation's samples: {', '.join(missing)} missing",
                where=str(path),
                fix="evaluate again; stored responses are not sampled again",
            )
        rows = table.select(SCHEMA.names).to_pylist()
        return [EvalSample(**row | {name: json.loads(row[name]) for name in _AS_JSON}) for row in rows]
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise UsageError(f"the samples cannot be read: {first_line(error)}", where=str(path)) from error


def by_question(samples: Sequence[EvalSample]) -> Iterator[list[EvalSample]]:
    """Yields the samples of each question, in order of first occurrence."""
    groups: dict[int, list[EvalSample]] = {}
    for sample in samples:
        groups.setdefault(sample.question_index, []).append(sample)
    yield from groups.values()


def _row(sample: EvalSample) -> dict[str, Any]:
    values = {each.name: getattr(sample, each.name) for each in fields(EvalSample)}
    values |= {name: json.dumps(values[name]) for name in _AS_JSON}
    return values | {name: encodable(text) for name, text in values.items() if isinstance(text, str)}
