"""Reads dumped rollouts of rlctl, slime, miles and NeMo-RL, one training step at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlctl.errors import UsageError
from rlctl.track.rollouts import ROLLOUTS_DIR, SCHEMA
from rlctl.what_if.dumps_peers import read_nemo, read_slime, step_of
from rlctl.what_if.step import Step

_NEMO = re.compile(r"train_data_step(\d+)\.jsonl")
_COLUMNS = ["step", "group_id", "reward", "response_ids", "rollout_log_probs", "training_log_probs"]
_ROWS_AT_ONCE = 512
_FIX = (
    "name a run directory with rollouts/*.parquet (kept with trainer.rollouts_per_step), slime's "
    "train_data/*.pt or NeMo-RL's train_data_step*.jsonl"
)


class Dump(NamedTuple):
    """Dumped rollouts of one layout."""

    files: tuple[Path, ...]  # at least one, in the order of their steps
    #: reads the files, with one step in memory at a time; raises UsageError where a file cannot be read or
    #: lacks data that a replay needs
    steps: Iterator[Step]


def find_dump(path: Path) -> Dump:
    """Finds the dumped rollouts in a file or directory and detects their layout.

    Raises:
        UsageError: there are no dumped rollouts.
    """
    if not path.exists():
        raise UsageError("no such file or directory", where=str(path), fix=_FIX)
    places = [path, path / ROLLOUTS_DIR, path / "train_data"] if path.is_dir() else [path]
    for place in places:
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        for belongs, read in _LAYOUTS:
            if chosen := [file for file in files if belongs(file)]:
                in_order = tuple(sorted(chosen, key=lambda file: (step_of(file), file.name)))
                return Dump(in_order, read(in_order))
    raise UsageError("no dumped rollouts found", where=str(path), fix=_FIX)


# --- rlctl ----------------------------------------------------------------------------------------


def _read_own(files: Sequence[Path]) -> Iterator[Step]:
    """Reads `rollouts-*.parquet` (`rlctl.track.rollouts.SCHEMA`); a step's rows are adjacent in one file."""
    import pyarrow as pa

    for file in files:
        for _, rows in groupby(_rows(file), key=lambda rows: rows.column("step")[0].as_py()):
            yield _own_step(file, pa.Table.from_batches(rows))


def _rows(file: Path) -> Iterator[Any]:
    """Yields batches of adjacent rows of one step."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([SCHEMA.field(name) for name in _COLUMNS])
    try:
        with pq.ParquetFile(file) as parquet:
            missing = [name for name in _COLUMNS if name not in parquet.schema_arrow.names]
            if missing:
                raise UsageError(f"no column {', '.join(missing)}", where=str(file), fix=_FIX)
            for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=_COLUMNS):
                rows = batch.select(_COLUMNS).cast(schema)
                cuts = np.flatnonzero(np.diff(rows.column("step").to_numpy())) + 1
                for start, stop in pairwise([0, *cuts.tolist(), len(rows)]):
                    if start < stop:
                        yield rows.slice(start, stop - start)
    except (OSError, pa.ArrowException, ValueError) as error:  # ValueError: null in a required column
        fix = "move it out of the directory to replay the others"
        raise UsageError(f"cannot be read as rollouts: {error}", where=str(file), fix=fix) from error


def _own_step(file: Path, table: Any) -> Step:
    """Converts the rows of one step.

    Raises:
        UsageError: the numbers of tokens and log-probs of a response differ.
    """

    def flat(name: str, kind: type) -> tuple[NDArray[Any], NDArray[np.int64]]:
        column = table.column(name).combine_chunks()
        values = column.flatten().to_numpy(zero_copy_only=False).astype(kind, copy=False)
        return values, np.diff(column.offsets.to_numpy()).astype(np.int64)

    token_ids, lengths = flat("response_ids", np.int64)
    rollout_log_probs, of_rollout = flat("rollout_log_probs", np.float32)
    log_probs, of_training = flat("training_log_probs", np.float32)
    if not (np.array_equal(lengths, of_rollout) and np.array_equal(lengths, of_training)):
        what = f"step {table.column('step')[0]}: a response has more or fewer log-probs than tokens"
        raise UsageError(what, where=str(file))
    return Step(
        number=table.column("step")[0].as_py(),
        group_ids=table.column("group_id").to_numpy(),
        rewards=table.column("reward").to_numpy().astype(np.float64),
        lengths=lengths,
        token_ids=token_ids,
        rollout_log_probs=rollout_log_probs,
        log_probs=log_probs,
    )


#: Per layout: whether it has a file of this name, and its reader.
_LAYOUTS: tuple[tuple[Callable[[Path], bool], Callable[[Sequence[Path]], Iterator[Step]]], ...] = (
    (lambda file: file.suffix == ".parquet" and file.name.startswith("rollouts-"), _read_own),
    (lambda file: file.suffix == ".pt" and file.stem.split("_")[0].isdigit(), read_slime),
    (lambda file: bool(_NEMO.fullmatch(file.name)), read_nemo),
)
