"""Reads a run's dumped rollouts, one training step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlctl.errors import UsageError
from rlctl.track.rollouts import ROLLOUTS_DIR, SCHEMA

_LISTS = ("sampled", "turn", "rollout_log_probs", "training_log_probs")
_COLUMNS = ("step", "group_id", "reward", "episode_id", *_LISTS)
_FIX = "name a run directory with rollouts/*.parquet (kept with trainer.rollouts_per_step)"


@dataclass(frozen=True, slots=True)
class Step:
    """The E episodes of one training step, with columns of their M sampled tokens, in order."""

    number: int  # number of the step
    group_ids: NDArray[np.int64]  # (E,), equal for the episodes of one prompt
    rewards: NDArray[np.float64]  # (E,), NaN where the grader failed
    lengths: NDArray[np.int64]  # (E,), sampled tokens
    #: rollout_log_probs, log_probs: (M,), nats, of the sampling and the trained policy
    rollout_log_probs: NDArray[np.float32]
    log_probs: NDArray[np.float32]
    advantages: NDArray[np.float64] | None = None  # (E,); None: computed from the rewards
    #: sampled tokens of each sequence and of each turn; None: there is one per episode
    sequence_lengths: NDArray[np.int64] | None = None
    turn_lengths: NDArray[np.int64] | None = None


class Dump(NamedTuple):
    """Dumped rollouts of a run."""

    files: list[Path]  # at least one, in the order of their steps
    #: reads one file at a time; raises UsageError where a file cannot be read
    steps: Iterator[Step]


def find_dump(path: Path) -> Dump:
    """Finds the dumped rollouts of a run directory, in a directory of files, or in one file.

    Raises:
        UsageError: there are no dumped rollouts.
    """
    if not path.exists():
        raise UsageError("no such file or directory", where=str(path), fix=_FIX)
    places = (path, path / ROLLOUTS_DIR)
    files = [path] if path.is_file() else sorted(f for p in places for f in p.glob("rollouts-*.parquet"))
    if not files:
        raise UsageError("no dumped rollouts found", where=str(path), fix=_FIX)
    return Dump(files, (step for file in files for step in _steps_of(file)))


def _steps_of(file: Path) -> Iterator[Step]:
    """The steps of a file, whose rows are adjacent."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file, columns=list(_COLUMNS)).select(_COLUMNS)
        table = table.cast(pa.schema([SCHEMA.field(name) for name in _COLUMNS]))
        cuts = np.flatnonzero(np.diff(table["step"].to_numpy())) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(table)]):
            if start < stop:
                yield _step(table.slice(start, stop - start))
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:  # ValueError: null in a column
        fix = "move it out of the directory to replay the others"
        raise UsageError(f"cannot be read as rollouts: {error}", where=str(file), fix=fix) from error


def _step(rows: Any) -> Step:
    """Converts the rows of one step, one per sequence.

    Raises:
        ValueError: the numbers of tokens and log-probs of a sequence differ.
    """
    lists = {name: rows[name].combine_chunks() for name in _LISTS}
    sizes = {name: np.diff(values.offsets.to_numpy()).astype(np.int64) for name, values in lists.items()}
    if any(not np.array_equal(sizes["sampled"], of_column) for of_column in sizes.values()):
        raise ValueError(f"step {rows['step'][0]}: a sequence has more or fewer log-probs than tokens")
    flat = {name: values.flatten().to_numpy(zero_copy_only=False) for name, values in lists.items()}
    sampled = flat["sampled"].astype(bool)
    sequence = np.repeat(np.arange(len(rows)), sizes["sampled"])[sampled]
    episode_ids = rows["episode_id"].to_numpy()
    first = np.flatnonzero(np.append(True, episode_ids[1:] != episode_ids[:-1]))
    in_sequences = np.bincount(sequence, minlength=len(rows))
    turn = flat["turn"][sampled]
    starts = np.append(True, (np.diff(turn) != 0) | (np.diff(sequence) != 0))[: len(turn)]
    return Step(
        number=rows["step"][0].as_py(),
        group_ids=rows["group_id"].to_numpy()[first],
        rewards=rows["reward"].to_numpy().astype(np.float64)[first],
        lengths=np.add.reduceat(in_sequences, first),
        rollout_log_probs=flat["rollout_log_probs"][sampled].astype(np.float32),
        log_probs=flat["training_log_probs"][sampled].astype(np.float32),
        sequence_lengths=in_sequences,
        turn_lengths=np.diff(np.append(np.flatnonzero(starts), len(turn))),
    )
