"""`rollouts/*.parquet`: sampled sequences with the log-probs of both policies, for reading and replay."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlctl.episodes import Episodes
from rlctl.errors import RunFailure, first_line, missing_steps, steps_in_words
from rlctl.files import encodable, open_regular, replacing
from rlctl.lazy import torch
from rlctl.run_files import create_directory, remove, rename

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.batch import Episode, TokenLists

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
        pa.field("terms", pa.map_(pa.string(), pa.float32())),  # of the reward, before weights; null: unknown
        pa.field("remarks", pa.map_(pa.string(), pa.string())),  # of terms, such as a judge's; null: none
        pa.field("truncated", pa.bool_(), nullable=False),
        *(pa.field(name, pa.list_(kind), nullable=False) for name, kind in _LISTS.items()),
    ],
    metadata={"rlctl.rollouts": "4"},
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
        columns: names of further columns of the tokens, float32; null where a token was not trained on.
        decode: token ids → text, for prompts that an environment or an agent wrote; None: the row's prompt.
    """

    def __init__(
        self,
        run_dir: Path,
        max_per_step: int,
        *,
        exact_sampling: bool = False,
        columns: Sequence[str] = (),
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._decode = decode
        self.directory = run_dir / ROLLOUTS_DIR
        self._schema = SCHEMA.append(KEPT) if exact_sampling else SCHEMA
        for name in columns:
            self._schema = self._schema.append(pa.field(name, pa.list_(pa.float32()), nullable=False))
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
        terms: Sequence[Mapping[str, float]] | None = None,
        remarks: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        """Adds one step's episodes, of M sampled tokens.

        Args:
            terms: one per episode, label → score of the reward's terms; None: unknown.
            remarks: one per episode, label → what the term's grader said; None: nothing.
            rewards: one per episode; None: it was not graded, and `columns` have no meaning for it.
            columns: `training_log_probs` (M,) nats, of the training policy in the ratios;
                `rollout_is_weights` (M,), factors of the loss, zero where rejected; `keep_mask` (M,), false
                where rejected; and the further columns.

        Raises:
            ValueError: the step is not greater than the last one.
            RunFailure: a part cannot be written.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"rollouts of step {step} added after those of step {self._last_step}")
        self._last_step = step
        if self._max == 0 or not episodes:
            return
        every = Episodes.of(episodes)
        chosen = whole_groups([task.group_id for task in every.tasks], self._max)
        kept = every.pick(chosen)
        graded = [rewards[index] for index in chosen]
        known = [terms[index] if terms else None for index in chosen]
        said = [remarks[index] if remarks else None for index in chosen]
        of_chosen = np.isin(np.repeat(np.arange(len(every)), every.num_sampled.numpy()), chosen)
        # NumPy has no bfloat16
        arrays = {name: x.detach().float().cpu().numpy()[of_chosen] for name, x in columns.items()}
        self._batches.append(
            _record_batch(step, kept, graded, known, said, arrays, self._schema, self._decode)
        )
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
            create_directory(self.directory)
            table = pa.Table.from_batches(self._batches, self._schema)
            _write(self.directory, self._steps[0], self._steps[-1], table)
        except OSError as error:
            raise _failure(self.directory, error) from error
        self._batches = []
        self._steps = []

    def discard_after(self, step: int) -> list[str]:
        """Removes the rows of all steps after `step` before a resume, because these steps are sampled again.

        Returns:
            Warnings about missing steps and damaged parts. Damaged parts are renamed, so that readers skip
            them.

        Raises:
            RunFailure: a part cannot be read or rewritten.
        """
        there: list[range] = []
        notes: list[str] = []
        try:
            if os.path.lexists(self.directory):
                create_directory(self.directory)  # an error if it is a link
            for leftover in self.directory.glob(".*.tmp"):
                remove(leftover)
            for path in sorted(self.directory.glob("rollouts-*.parquet")):
                match = _PART.fullmatch(path.name)
                if match is None:
                    continue
                first, last = map(int, match.groups())
                kept = None
                problem = _damage(path, self._schema)
                if not problem and first <= step < last:
                    kept, problem = _rows_until(path, step)
                if problem:
                    rename(path, path.with_name(f"{path.name}.damaged"))
                    notes.append(
                        f"warning: {ROLLOUTS_DIR}/{path.name} is damaged ({problem}) and was moved aside"
                    )
                    continue
                there.append(range(first, min(last, step) + 1))
                if last <= step:
                    continue
                if kept is not None:
                    _write(self.directory, first, step, kept)
                remove(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise _failure(self.directory, error) from error
        missing = missing_steps(there, step)
        if missing:
            notes.append(f"warning: {ROLLOUTS_DIR}/ has no responses of {steps_in_words(missing)}")
        return notes


def _damage(path: Path, schema: pa.Schema) -> str:
    """Reason why a part cannot be read; empty if it can."""
    try:
        open_regular(path).close()
        stored = pq.ParquetFile(path).schema_arrow
        versions = [schema]
        older = schema
        for name in ("remarks", "terms"):  # which version 3 and 2 lack; readers promote them
            older = older.remove(older.get_field_index(name))
            versions.append(older)
        if not any(stored.equals(version) for version in versions):
            return "it has other columns"
    except (OSError, pa.ArrowInvalid) as error:
        return first_line(error)
    return ""


def _rows_until(path: Path, step: int) -> tuple[pa.Table | None, str]:
    """The rows of a part up to a step, and why they cannot be read; empty if they can."""
    try:
        return pq.read_table(path, filters=pc.field("step") <= step), ""
    except (OSError, pa.ArrowException) as error:
        return None, first_line(error)


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


def _prompts_read(episodes: Episodes, decode: Callable[[list[int]], str] | None) -> list[str]:
    """What the policy read before it first spoke in each sequence."""
    tokens = episodes.tokens
    tasks = [episodes.tasks[owner] for owner in episodes.tokens.owners.tolist()]
    if decode is None:
        return [task.text for task in tasks]
    texts = []
    parts = [torch.split(column, tokens.lengths.tolist()) for column in (tokens.token_ids, tokens.sampled)]
    for task, ids, sampled in zip(tasks, *parts, strict=True):
        read = ids[: int(sampled.int().argmax()) if sampled.any() else len(ids)].tolist()
        texts.append(task.text if read == list(task.prompt_ids) else decode(read))
    return texts


def _record_batch(
    step: int,
    episodes: Episodes,
    rewards: Sequence[float | None],
    terms: Sequence[Mapping[str, float] | None],
    remarks: Sequence[Mapping[str, str] | None],
    arrays: Mapping[str, Any],
    schema: pa.Schema,
    decode: Callable[[list[int]], str] | None,
) -> pa.RecordBatch:
    """One row per sequence of these episodes; `given` are the columns (M,) of their sampled tokens.

    No array shares memory with the trainer.
    """
    tokens = episodes.tokens
    owners = episodes.tokens.owners.tolist()
    sampled = np.array(tokens.sampled.numpy())
    spans = tokens.units.sequence
    in_episode = tokens.sequences_of_episodes
    lengths = tokens.lengths.numpy()
    has_reward = np.repeat([rewards[owner] is not None for owner in owners], lengths).astype(bool)
    offsets = pa.array([0, *lengths.cumsum().tolist()], pa.int32())

    def over_all(values: Any, fill: Any) -> Any:
        column = np.full(len(sampled), fill, values.dtype)
        column[sampled] = values
        return column

    flat: dict[str, pa.Array] = {
        "token_ids": pa.array(np.array(tokens.token_ids.numpy())),
        "sampled": pa.array(sampled),
        "turn": pa.array(over_all(tokens.turns.numpy(), -1)),
        "versions": pa.array(over_all(tokens.versions.numpy(), -1)),
        "rollout_log_probs": pa.array(over_all(tokens.rollout_log_probs.numpy(), 0.0), mask=~sampled),
        "keep_mask": pa.array((over_all(arrays["keep_mask"], 0.0) > 0) & has_reward),
    }
    weights = np.where(has_reward, over_all(arrays["rollout_is_weights"], 0.0), np.float32(0.0))
    flat["rollout_is_weights"] = pa.array(weights, mask=~sampled)
    trained = over_all(arrays["training_log_probs"], 0.0)
    flat["training_log_probs"] = pa.array(trained, mask=~(sampled & has_reward))

    def texts(values: list[str]) -> list[str]:
        return [encodable(value) for value in values]

    def of_owners(values: Sequence[Any]) -> list[Any]:
        return [values[owner] for owner in owners]

    tasks = of_owners(episodes.tasks)
    members = of_owners(tokens.members.tolist())
    stop_reasons = of_owners(episodes.stop_reasons)
    speaks = (spans.lengths > 0).tolist()
    versions = [*tokens.versions.tolist(), None]
    columns: dict[str, Any] = {
        "step": [step] * len(owners),
        "policy_version": [
            versions[start] if has_any else None
            for start, has_any in zip(spans.starts.tolist(), speaks, strict=True)
        ],
        "group_id": [task.group_id for task in tasks],
        "member": members,
        "episode_id": [
            f"{step}/{task.group_id}/{member}" for task, member in zip(tasks, members, strict=True)
        ],
        "sequence": in_episode.places.tolist(),
        "num_turns": of_owners(_num_turns(episodes)),
        "stop_reason": stop_reasons,
        "data_source": texts([task.data_source for task in tasks]),
        "prompt": texts(_prompts_read(episodes, decode)),
        "response": texts(of_owners(episodes.responses)),
        "ground_truth": texts([task.ground_truth for task in tasks]),
        "reward": of_owners(rewards),
        "terms": of_owners([None if each is None else list(each.items()) for each in terms]),
        "remarks": of_owners([_texts(each) for each in remarks]),
        "truncated": [reason == "max_tokens" for reason in stop_reasons],
    }
    for name, kind in _LISTS.items():
        columns[name] = pa.ListArray.from_arrays(offsets, flat[name].cast(kind))
    for name in arrays.keys() - _LISTS.keys():
        values = over_all(arrays[name], np.float32(0.0))
        flat[name] = pa.array(values, mask=~(sampled & has_reward))
        columns[name] = pa.ListArray.from_arrays(offsets, flat[name])
    if KEPT.name in schema.names:
        columns[KEPT.name] = pa.ListArray.from_arrays(offsets, _kept(tokens.columns.get("kept"), sampled))
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def _num_turns(episodes: Episodes) -> list[int]:
    """Number of turns of each episode, over all of its sequences."""
    tokens = episodes.tokens
    pairs = zip(tokens.units.episode.index.tolist(), tokens.turns.tolist(), strict=True)
    counts = Counter(episode for episode, _ in set(pairs))
    return [counts[episode] for episode in range(len(episodes))]


def _texts(remarks: Mapping[str, str] | None) -> list[tuple[str, str]] | None:
    if not remarks:
        return None
    return [(label, encodable(text)) for label, text in remarks.items()]


def _kept(kept: TokenLists | None, sampled: Any) -> pa.ListArray:
    """The ids that each token was sampled from; empty where it was not sampled."""
    counts = np.zeros(len(sampled), np.int32)
    if kept is not None:
        counts[sampled] = kept.counts.numpy()
    ids = np.empty(0, np.int32) if kept is None else np.array(kept.ids.numpy())
    ends = pa.array([0, *counts.cumsum().tolist()], pa.int32())
    return pa.ListArray.from_arrays(ends, pa.array(ids, pa.int32()))


def _write(directory: Path, first: int, last: int, table: pa.Table) -> None:
    with replacing(directory / f"rollouts-{first:06d}-{last:06d}.parquet") as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _failure(directory: Path, error: Exception) -> RunFailure:
    return RunFailure(
        f"rollouts cannot be kept: {getattr(error, 'strerror', None) or error}",
        where=str(directory),
        fix="free space, or keep none with trainer.rollouts_per_step=0",
    )
