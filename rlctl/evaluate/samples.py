"""`samples.parquet`: every response that was sampled, and what the grader said of it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from rlctl.batch import Rollouts
from rlctl.reward.protocol import RewardResult

SAMPLES_FILE = "samples.parquet"

#: One row per sampled response, the siblings of a question adjacent.
SCHEMA = pa.schema(
    [
        pa.field("question_index", pa.int64(), nullable=False),  # place among the prompts asked, from 0
        pa.field("sample_index", pa.int64(), nullable=False),  # 0 … n − 1
        pa.field("data_source", pa.large_string(), nullable=False),
        pa.field("prompt", pa.large_string(), nullable=False),  # as the model reads it
        pa.field("response", pa.large_string(), nullable=False),
        pa.field("ground_truth", pa.large_string(), nullable=False),
        pa.field("reward", pa.float32()),  # null where the grader failed
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),  # of the response, end of sequence included
    ],
    metadata={"rlctl.samples": "1"},
)


class SampleWriter:
    """Appends batches to a Parquet file; a context manager."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")

    def add(self, first_question: int, n: int, rollouts: Rollouts, rewards: RewardResult) -> None:
        """Write B responses: n to each question, from question number `first_question` on."""
        rows = range(len(rollouts.response_texts))
        graded = zip(rewards.scores.tolist(), rewards.valid.tolist(), strict=True)
        columns = {
            "question_index": [first_question + row // n for row in rows],
            "sample_index": [row % n for row in rows],
            "data_source": rollouts.data_sources,
            "prompt": _storable(rollouts.prompt_texts),
            "response": _storable(rollouts.response_texts),
            "ground_truth": _storable(rollouts.ground_truths),
            "reward": [score if is_valid else None for score, is_valid in graded],
            "truncated": rollouts.truncated.tolist(),
            "num_tokens": rollouts.response_mask.sum(-1).tolist(),
        }
        self._writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=SCHEMA))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()


def _storable(texts: tuple[str, ...]) -> list[str]:
    """Lone surrogates, which a tokenizer may produce, cannot be stored as UTF-8."""
    return [text.encode("utf-8", "replace").decode() for text in texts]
