"""`rollouts/*.parquet`: sampled sequences with the log-probs of both policies, for reading and replay."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlctl.errors import RunFailure, first_line, steps_in_words
from rlctl.files import replacing

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.batch import Episode

ROLLOUTS_DIR = "rollouts"

_LISTS = {
    "token_ids": pa.int32(),
    "sampled": pa.bool_(),  # the policy sampled it: not the prompt, not a tool's output
    "turn": pa.int32(),  # its number in the episode; −1: not sampled
    "versions": pa.int64(),  # optimizer updates in the weights that sampled it; −1: not sampled
    "rollout_log_probs": pa.float32(),  # null: not sampled; so are the next two columns
    "training_log_probs": pa.float32(),  # also null: the episode was not graded
    "rollout_is_weights": pa.float32(),  # 0: it does not reach the loss
    "keep_mask": pa.bool_(),  # it was trained on: sampled, graded and not rejected
}
#: One row per sequence. All lists have one entry per token of the sequence, prompt included, in order.
SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("policy_version", pa.int64()),  # of the first sampled token; null: there is none
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("member", pa.int64(), nullable=False),
        pa.field("episode_id", pa.string(), nullable=False),  # step/group/member
        pa.field("sequence", pa.int64(), nullable=False),  # its number in the episode
        pa.field("num_turns", pa.int64(), nullable=False),  # of the episode
        pa.field("stop_reason", pa.string(), nullable=False),
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("response", pa.string(), nullable=False),
        pa.field("ground_truth", pa.string(), nullable=False),
        pa.field("reward", pa.float32()),  # of the episode; null if the grader failed
        pa.field("truncated", pa.bool_(), nullable=False),
        *(pa.field(name, pa.list_(kind), nullable=False) for name, kind in _LISTS.items()),
    ],
    metadata={"rlctl.rollouts": "2"},
)
#: With exact sampling: for each token, the ids that it was sampled from; empty: the whole vocabulary, or the
#: token was not sampled.
KEPT = pa.field("kept_ids", pa.list_(pa.list_(pa.int32())), nullable=False)

#: A file is written after this many steps or bytes, and at every checkpoint.
FLUSH_STEPS = 64
FLUSH_BYTES = 64 * 2**20
_PART = re.compile(r"rollouts-(\d+)-(\d+)\.parquet")


class RolloutWriter:
    """Collects sequences and writes them to files (parts) named after their first and last step.

    Rows that are not flushed are lost if the process ends: call `flush` before a checkpoint is published.

    Args:
        run_dir: existing run directory.
        max_per_step: episodes kept per step; whole groups only, at least one group. 0: none, -1: all.
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
        episodes: Sequence[Episode],
        rewards: Sequence[float | None],
        columns: Mapping[str, Tensor],
    ) -> None:
        """Adds one step's episodes, of M sampled tokens.

        Args:
            rewards: one per episode; None: it was not graded, and `columns` have no meaning for it.
            columns: `training_log_probs` (M,) nats, of the training policy in the ratios;
                `rollout_is_weights` (M,), factors of the loss, zero where rejected; `keep_mask` (M,), false
                where rejected.

        Raises:
            ValueError: the step is not greater than the last one.
            RunFailure: a part cannot be written.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"rollouts of step {step} added after those of step {self._last_step}")
        self._last_step = step
        if self._max == 0 or not episodes:
            return
        chosen = whole_groups([episode.task.group_id for episode in episodes], self._max)
        kept = [(episodes[place], rewards[place]) for place in chosen]
        sizes = [episode.num_sampled for episode in episodes]
        of_chosen = np.isin(np.repeat(np.arange(len(episodes)), sizes), chosen)
        # NumPy has no bfloat16
        given = {name: x.detach().float().cpu().numpy()[of_chosen] for name, x in columns.items()}
        self._batches.append(_record_batch(step, kept, given, self._schema))
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
                    _write(self.directory, first, step, pq.read_table(path, filters=pc.field("step") <= step))
                path.unlink()
        except (OSError, pa.ArrowInvalid) as error:
            raise _failure(self.directory, error) from error
        if missing := sorted(set(range(1, step + 1)) - there):
            notes.append(f"warning: {ROLLOUTS_DIR}/ has no responses of {steps_in_words(missing)}")
        return notes


def _damage(path: Path, schema: pa.Schema) -> str:
    """Reason why a part cannot be read; empty if it can."""
    try:
        found = pq.ParquetFile(path).schema_arrow
        if not found.equals(schema):
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
    step: int, episodes: list[tuple[Episode, float | None]], given: Mapping[str, Any], schema: pa.Schema
) -> pa.RecordBatch:
    """One row per sequence of these episodes; `given` are the columns (m,) of their sampled tokens."""
    rows = [
        (episode, number, sequence, reward)
        for episode, reward in episodes
        for number, sequence in enumerate(episode.sequences)
    ]
    lengths = np.array([len(sequence.token_ids) for _, _, sequence, _ in rows])
    sampled = _joined([sequence.sampled for _, _, sequence, _ in rows], np.bool_)
    graded = np.repeat([reward is not None for *_, reward in rows], lengths)
    offsets = pa.array([0, *lengths.cumsum().tolist()], pa.int32())

    def over_all(values: Any, fill: Any) -> Any:
        found = np.full(len(sampled), fill, values.dtype)
        found[sampled] = values
        return found

    def column(name: str) -> Any:
        return _joined([getattr(sequence, name) for _, _, sequence, _ in rows])

    flat: dict[str, pa.Array] = {
        "token_ids": pa.array(column("token_ids")),
        "sampled": pa.array(sampled),
        "turn": pa.array(over_all(column("turns"), -1)),
        "versions": pa.array(over_all(column("versions"), -1)),
        "rollout_log_probs": pa.array(over_all(column("log_probs"), 0.0), mask=~sampled),
        "keep_mask": pa.array((over_all(given["keep_mask"], 0.0) > 0) & graded),
    }
    weights = np.where(graded, over_all(given["rollout_is_weights"], 0.0), np.float32(0.0))
    flat["rollout_is_weights"] = pa.array(weights, mask=~sampled)
    trained = over_all(given["training_log_probs"], 0.0)
    flat["training_log_probs"] = pa.array(trained, mask=~(sampled & graded))

    def texts(values: list[str]) -> list[str]:
        # A lone surrogate, which a tokenizer can produce, cannot be encoded as UTF-8.
        return [value.encode("utf-8", "replace").decode() for value in values]

    turns = {id(episode): _num_turns(episode) for episode, _ in episodes}
    columns: dict[str, Any] = {
        "step": [step] * len(rows),
        "policy_version": [int(s.versions[0]) if len(s.versions) else None for _, _, s, _ in rows],
        "group_id": [episode.task.group_id for episode, *_ in rows],
        "member": [episode.member for episode, *_ in rows],
        "episode_id": [f"{step}/{episode.task.group_id}/{episode.member}" for episode, *_ in rows],
        "sequence": [number for _, number, *_ in rows],
        "num_turns": [turns[id(episode)] for episode, *_ in rows],
        "stop_reason": [episode.stop_reason for episode, *_ in rows],
        "data_source": texts([episode.task.data_source for episode, *_ in rows]),
        "prompt": texts([episode.task.text for episode, *_ in rows]),
        "response": texts([episode.response for episode, *_ in rows]),
        "ground_truth": texts([episode.task.ground_truth for episode, *_ in rows]),
        "reward": [reward for *_, reward in rows],
        "truncated": [episode.truncated for episode, *_ in rows],
    }
    for name, kind in _LISTS.items():
        columns[name] = pa.ListArray.from_arrays(offsets, flat[name].cast(kind))
    if KEPT.name in schema.names:
        columns[KEPT.name] = pa.ListArray.from_arrays(offsets, _kept(rows, sampled))
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def _joined(parts: list[Tensor], kind: Any = None) -> Any:
    """The columns, one after the other, as an array that shares no memory with the trainer."""
    arrays = [part.cpu().numpy() for part in parts]
    return np.concatenate([np.empty(0, kind or (arrays[0].dtype if arrays else float)), *arrays])


def _num_turns(episode: Episode) -> int:
    return len(np.unique(_joined([sequence.turns for sequence in episode.sequences])))


def _kept(rows: list[Any], sampled: Any) -> pa.ListArray:
    """The ids that each token was sampled from; empty where it was not sampled."""
    kept = [sequence.kept for _, _, sequence, _ in rows if sequence.kept is not None]
    counts = np.zeros(len(sampled), np.int32)
    counts[sampled] = _joined([part.counts for part in kept])
    ends = pa.array([0, *counts.cumsum().tolist()], pa.int32())
    return pa.ListArray.from_arrays(ends, pa.array(_joined([part.ids for part in kept]), pa.int32()))


def _write(directory: Path, first: int, last: int, table: pa.Table) -> None:
    with replacing(directory / f"rollouts-{first:06d}-{last:06d}.parquet") as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _failure(directory: Path, error: Exception) -> RunFailure:
    return RunFailure(
        f"rollouts cannot be kept: {getattr(error, 'strerror', None) or error}",
        where=str(directory),
        fix="free space, or keep none with trainer.rollouts_per_step=0",
    )
