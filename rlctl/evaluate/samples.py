"""Responses to questions and what the grader said of them; on disk `samples.parquet`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlctl.data.render import messages_of
from rlctl.data.schema import Row
from rlctl.errors import UsageError, first_line
from rlctl.rollout.protocol import Sampling

SAMPLES_FILE = "samples.parquet"

#: (question, sample): the question's place in the data, from 0, and the response's number, from 0.
Pair = tuple[int, int]
_ROWS_AT_ONCE = 4096
#: Kept as JSON text: their shape is the data's own.
_AS_JSON = ("messages", "extra_info")


@dataclass(frozen=True, slots=True)
class EvalSample:
    """One response to one question."""

    question_index: int  # the question's place among those asked, from 0
    sample_index: int  # 0 … n − 1
    data_source: str  # the question's source
    prompt: str  # as the model reads it
    response: str  # what the model said
    ground_truth: str  # what the grader compares with
    truncated: bool  # cut off at the length limit
    num_tokens: int  # of the response, end of sequence included
    #: the question as a conversation, before any chat template; () where it is not known
    messages: Sequence[Mapping[str, str]] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)  # of the data, for graders
    reward: float | None = None  # None where the grader failed, and before grading
    #: what the response answers, for majority votes; None: no answer, or none is read
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """What a model said."""

    text: str
    truncated: bool  # cut off at the length limit
    num_tokens: int


class AskedModel:
    """A model, on this machine or behind a server, and the questions it is asked."""

    rows: list[Row]  # those questions that may fit
    prompts: list[str]  # each as the model reads it; of a server without any chat template
    identities: list[str]  # of each question, what its responses depend on
    num_overlong: int = 0  # questions left out for their length, before sampling
    settings: dict[str, Any]  # what responses depend on, question and seed excepted; JSON
    model: dict[str, Any]  # as in `results.json`
    sampling: Sampling  # the distribution to draw from
    about_sampling: dict[str, Any]  # who samples, and in which arithmetic (None: not known)

    @property
    def notes(self) -> list[str]:
        """What the user should know of the sampling."""
        return []

    def sample(self, pairs: Sequence[Pair]) -> Iterator[dict[Pair, Response]]:
        """Yield these responses, ascending pairs, as they arrive; a question too long may have none.

        Raises:
            UsageError, EnvironmentFailure: the model or the engine cannot be used here.
            RunFailure: a server refuses a request, or fails again and again.
        """
        raise NotImplementedError


def as_samples(
    rows: Sequence[Row], prompts: Sequence[str], responses: Mapping[Pair, Response]
) -> list[EvalSample]:
    """Ungraded samples, in the order of `responses`.

    Responses and prompts (as the model reads them) are by place in `rows`.
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
        )
        for (question, sample), response in responses.items()
    ]


_TEXT = pa.large_string()
_REQUIRED = {
    **{"question_index": pa.int64(), "sample_index": pa.int64(), "data_source": _TEXT, "prompt": _TEXT},
    **{"response": _TEXT, "ground_truth": _TEXT, "truncated": pa.bool_(), "num_tokens": pa.int64()},
    **{"messages": _TEXT, "extra_info": _TEXT},
}
#: One row per response, the siblings of a question adjacent.
SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=False) for name, kind in _REQUIRED.items()]
    + [pa.field("reward", pa.float64()), pa.field("answer", _TEXT)],
    metadata={"rlctl.samples": "2"},
)


def write_samples(path: Path, samples: Sequence[EvalSample]) -> None:
    """Write them as Parquet."""
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for start in range(0, len(samples), _ROWS_AT_ONCE):
            rows = [_row(sample) for sample in samples[start : start + _ROWS_AT_ONCE]]
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))


def read_samples(path: Path, *, without: frozenset[str] = frozenset()) -> list[EvalSample]:
    """What `write_samples` wrote. Columns of text in `without` are left unread, "" instead.

    Raises:
        UsageError: it cannot be read, or is another kind of file.
    """
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in SCHEMA.names if name not in file.schema_arrow.names]
            if missing:
                raise UsageError(
                    f"not an evaluation's samples: {', '.join(missing)} missing",
                    where=str(path),
                    fix="evaluate again; stored responses are not sampled again",
                )
            columns = [name for name in SCHEMA.names if name not in without]
            batches = file.iter_batches(_ROWS_AT_ONCE, columns=columns)
            return [_sample(row, without) for batch in batches for row in batch.to_pylist()]
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise UsageError(f"the samples cannot be read: {first_line(error)}", where=str(path)) from error


def by_question(samples: Sequence[EvalSample]) -> Iterator[list[EvalSample]]:
    """The samples of one question after the other, in the order they come."""
    groups: dict[int, list[EvalSample]] = {}
    for sample in samples:
        groups.setdefault(sample.question_index, []).append(sample)
    yield from groups.values()


def _row(sample: EvalSample) -> dict[str, Any]:
    values = {each.name: getattr(sample, each.name) for each in fields(EvalSample)}
    values |= {name: json.dumps(values[name]) for name in _AS_JSON}
    # Lone surrogates, which a tokenizer may produce, cannot be stored as UTF-8.
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    return values | {name: text.encode("utf-8", "replace").decode() for name, text in texts.items()}


def _sample(row: dict[str, Any], without: frozenset[str]) -> EvalSample:
    row |= {name: json.loads(row[name]) for name in _AS_JSON if name not in without}
    row |= dict.fromkeys(without, "")
    return EvalSample(**row)
