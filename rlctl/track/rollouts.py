"""`rollouts/*.parquet`: sampled responses with the log-probs of both policies, for reading and replay."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlctl.errors import RunFailure, first_line
from rlctl.files import replacing
from rlctl.track.open_run import steps_in_words

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.batch import Rollouts, TokenLists

ROLLOUTS_DIR = "rollouts"

#: One row per sampled response. All lists have one entry per response token, in order.
SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("policy_version", pa.int64(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("response", pa.string(), nullable=False),
        pa.field("ground_truth", pa.string(), nullable=False),
        pa.field("reward", pa.float32()),  # null if the grader failed
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("rollout_log_probs", pa.list_(pa.float32()), nullable=False),
        pa.field("training_log_probs", pa.list_(pa.float32()), nullable=False),
        pa.field("rollout_is_weights", pa.list_(pa.float32()), nullable=False),
        pa.field("keep_mask", pa.list_(pa.bool_()), nullable=False),
    ],
    metadata={"rlctl.rollouts": "1"},
)
#: With exact sampling: for each token, the ids that it was sampled from; empty: the whole vocabulary.
KEPT = pa.field("kept_ids", pa.list_(pa.list_(pa.int32())), nullable=False)

#: A file is written after this many steps or bytes, and at every checkpoint.
FLUSH_STEPS = 64
FLUSH_BYTES = 64 * 2**20
_PART = re.compile(r"rollouts-(\d+)-(\d+)\.parquet")


class RolloutWriter:
    """Collects responses and writes them to files (parts) named after their first and last step.

    Rows that are not flushed are lost if the process ends: call `flush` before a checkpoint is published.

    Args:
        run_dir: existing run directory.
        max_per_step: responses kept per step; whole groups only, at least one group. 0: none, -1: all.
        exact_sampling: whether rollouts contain the token ids that each token was sampled from.
    """

    def __init__(self, run_dir: Path, max_per_step: int, *, exact_sampling: bool = False) -> None:
        self.directory = run_dir / ROLLOUTS_DIR
        self._schema = SCHEMA.append(KEPT) if exact_sampling else SCHEMA
        self._max = max_per_step
        self._batches: list[pa.RecordBatch] = []
        self._steps: list[int] = []
        self._last_step: int | None = None

    def add(
        self,
        step: int,
        rollouts: Rollouts,
        scores: Tensor,
        score_valid: Tensor,
        training_log_probs: Tensor,
        weights: Tensor,
        keep_mask: Tensor,
    ) -> None:
        """Adds one step's batch of B responses of up to T tokens.

        Args:
            scores: (B,) grader output.
            score_valid: (B,) bool; where False, the reward is null.
            training_log_probs: (B, T) nats, of the training policy in the ratios.
            weights: (B, T), factors of the loss: zero where rejected.
            keep_mask: (B, T) bool, False where rejected.

        Raises:
            ValueError: the step is not greater than the last one.
            RunFailure: a part cannot be written.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"rollouts of step {step} added after those of step {self._last_step}")
        self._last_step = step
        if self._max == 0:
            return
        rows = whole_groups(rollouts.group_ids.tolist(), self._max)
        if not rows:
            return
        valid = score_valid[rows].tolist()
        rewards = [score if ok else None for score, ok in zip(scores[rows].tolist(), valid, strict=True)]
        per_token = {
            "response_ids": rollouts.responses,
            "rollout_log_probs": rollouts.rollout_log_probs,
            "training_log_probs": training_log_probs,
            "rollout_is_weights": weights,
            "keep_mask": keep_mask.bool(),
        }
        batch = _record_batch(step, rows, rollouts, rewards, per_token)
        if rollouts.kept:
            picked = rollouts.group_ids.new_tensor(rows)
            batch = batch.append_column(KEPT, _kept(rollouts.kept[picked], rollouts.response_mask[rows]))
        self._batches.append(batch.cast(self._schema))
        self._steps.append(step)
        if len(self._steps) >= FLUSH_STEPS or sum(batch.nbytes for batch in self._batches) >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the collected rows atomically as one part.

        Raises:
            RunFailure: the part cannot be written; the rows stay collected.
        """
        if not self._batches:
            return
        try:
            self.directory.mkdir(exist_ok=True)
            table = pa.Table.from_batches(self._batches, self._schema)
            _write(self.directory, self._steps[0], self._steps[-1], table)
        except OSError as error:
            raise _failure(self.directory, error) from error
        self._batches, self._steps = [], []

    def discard_after(self, step: int) -> list[str]:
        """Removes the rows of all steps after `step` before a resume, because these steps are sampled again.

        Returns:
            Warnings about missing steps and damaged parts. Damaged parts are renamed, so that readers skip
            them.

        Raises:
            RunFailure: a part cannot be read or rewritten.
        """
        there: set[int] = set()
        notes: list[str] = []
        try:
            for leftover in self.directory.glob(".*.tmp"):
                leftover.unlink()
            for path in sorted(self.directory.glob("rollouts-*.parquet")):
                match = _PART.fullmatch(path.name)
                if match is None:
                    continue
                first, last = map(int, match.groups())
                if problem := _damage(path, self._schema):
                    path.rename(path.with_name(f"{path.name}.damaged"))
                    notes.append(
                        f"warning: {ROLLOUTS_DIR}/{path.name} is damaged ({problem}) and was moved aside"
                    )
                    continue
                there |= set(range(first, min(last, step) + 1))
                if last <= step:
                    continue
                if first <= step:
                    table = pq.read_table(path, schema=self._schema)
                    _write(self.directory, first, step, table.filter(pc.field("step") <= step))
                path.unlink()
        except (OSError, pa.ArrowInvalid) as error:
            raise _failure(self.directory, error) from error
        if missing := sorted(set(range(1, step + 1)) - there):
            notes.append(f"warning: {ROLLOUTS_DIR}/ has no responses of {steps_in_words(missing)}")
        return notes


def _damage(path: Path, schema: pa.Schema) -> str:
    """Reason why a part cannot be read; empty if it can."""
    try:
        if not pq.ParquetFile(path).schema_arrow.equals(schema):
            return "it has other columns"
    except (OSError, pa.ArrowInvalid) as error:
        return first_line(error)
    return ""


def whole_groups(group_ids: Sequence[int], limit: int) -> list[int]:
    """Rows to keep: groups in order of appearance while they fit into `limit` rows; always the first group.

    Rows of a group need not be adjacent. A limit of -1 keeps all rows.
    """
    if limit < 0:
        return list(range(len(group_ids)))
    sizes = Counter(group_ids)  # in order of appearance
    chosen: set[int] = set()
    total = 0
    for group, size in sizes.items():
        if chosen and total + size > limit:
            break
        chosen.add(group)
        total += size
    return [row for row, group in enumerate(group_ids) if group in chosen]


def _record_batch(
    step: int,
    rows: list[int],
    rollouts: Rollouts,
    rewards: list[float | None],
    per_token: Mapping[str, Tensor],
) -> pa.RecordBatch:
    """Converts the chosen rows to Arrow columns; `per_token` contains (B, T) tensors by column name."""
    mask = rollouts.response_mask[rows]
    offsets = pa.array([0, *mask.sum(dim=1).cumsum(dim=0).tolist()], pa.int32())

    def tokens(name: str) -> pa.ListArray:
        # Boolean indexing copies, so Arrow does not share memory with the trainer.
        flat = per_token[name].detach()[rows][mask]
        flat = flat.float() if flat.is_floating_point() else flat  # NumPy has no bfloat16
        return pa.ListArray.from_arrays(
            offsets, pa.array(flat.cpu().numpy()).cast(SCHEMA.field(name).type.value_type)
        )

    def texts(values: Sequence[str]) -> list[str]:
        # A lone surrogate, which a tokenizer can produce, cannot be encoded as UTF-8.
        return [values[row].encode("utf-8", "replace").decode() for row in rows]

    columns = {
        "step": [step] * len(rows),
        "policy_version": rollouts.policy_version[rows].tolist(),
        "group_id": rollouts.group_ids[rows].tolist(),
        "data_source": texts(rollouts.data_sources),
        "prompt": texts(rollouts.prompt_texts),
        "response": texts(rollouts.response_texts),
        "ground_truth": texts(rollouts.ground_truths),
        "reward": rewards,
        "truncated": rollouts.truncated[rows].tolist(),
        **{name: tokens(name) for name in per_token},
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


def _kept(kept: TokenLists, mask: Tensor) -> pa.ListArray:
    """The token ids that each response token was sampled from."""
    counts, ids = (x.cpu() for x in kept.at(mask))
    ends = pa.array([0, *counts.cumsum(0).tolist()], pa.int32())
    sets = pa.ListArray.from_arrays(ends, pa.array(ids.numpy()))
    return pa.ListArray.from_arrays(pa.array([0, *mask.sum(1).cumsum(0).tolist()], pa.int32()), sets)


def _write(directory: Path, first: int, last: int, table: pa.Table) -> None:
    with replacing(directory / f"rollouts-{first:06d}-{last:06d}.parquet") as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _failure(directory: Path, error: Exception) -> RunFailure:
    return RunFailure(
        f"rollouts cannot be kept: {getattr(error, 'strerror', None) or error}",
        where=str(directory),
        fix="free space, or keep none with trainer.rollouts_per_step=0",
    )
