"""Reads dumped rollouts of rlctl, slime, miles and NeMo-RL, one training step at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlctl.errors import UsageError
from rlctl.track.rollouts import FIRST_TOKENS as _V1_TOKENS
from rlctl.track.rollouts import ROLLOUTS_DIR, SCHEMA, current

_COLUMNS = (
    "step",
    "group_id",
    "reward",
    "episode_id",
    "sampled",
    "turn",
    "rollout_log_probs",
    "training_log_probs",
)
_ROWS_AT_ONCE = 512
_FIX = (
    "name a run directory with rollouts/*.parquet (kept with trainer.rollouts_per_step), slime's "
    "train_data/*.pt or NeMo-RL's train_data_step*.jsonl"
)


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
    advantages: NDArray[np.float64] | None = None  # (E,) from the dump; None: computed from the rewards
    #: sampled tokens of each sequence and of each turn; None: there is one per episode
    sequence_lengths: NDArray[np.int64] | None = None
    turn_lengths: NDArray[np.int64] | None = None


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
                in_order = tuple(sorted(chosen, key=lambda file: (_step_number(file), file.name)))
                return Dump(in_order, read(in_order))
    raise UsageError("no dumped rollouts found", where=str(path), fix=_FIX)


def _step_number(file: Path) -> int:
    """First number in a file's name; 0 if there is none."""
    number = re.search(r"\d+", file.stem)
    return int(number[0]) if number else 0


# --- rlctl ----------------------------------------------------------------------------------------


def _read_own(files: Sequence[Path]) -> Iterator[Step]:
    """Reads `rollouts-*.parquet` of any version; a step's rows are adjacent in one file."""
    import pyarrow as pa

    for file in files:
        for _, rows in groupby(_rows(file), key=lambda rows: rows.column("step")[0].as_py()):
            try:
                yield _own_step(pa.Table.from_batches(rows))
            except (pa.ArrowException, ValueError) as error:  # ValueError: null in a required column
                raise _unreadable(file, error) from error


def _rows(file: Path) -> Iterator[Any]:
    """Yields batches of adjacent rows of one step."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            there = parquet.schema_arrow.names
            columns = [name for name in (*_COLUMNS, _V1_TOKENS) if name in there]
            made = {"episode_id", "sampled", "turn"} if _V1_TOKENS in there else set()
            if missing := [name for name in _COLUMNS if name not in there and name not in made]:
                raise UsageError(f"no column {', '.join(missing)}", where=str(file), fix=_FIX)
            for rows in parquet.iter_batches(_ROWS_AT_ONCE, columns=columns):
                steps = rows.column("step")
                if steps.null_count:
                    raise ValueError("null values in column step")
                cuts = np.flatnonzero(np.diff(steps.to_numpy())) + 1
                for start, stop in pairwise([0, *cuts.tolist(), len(rows)]):
                    if start < stop:
                        yield rows.slice(start, stop - start)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> UsageError:
    fix = "move it out of the directory to replay the others"
    return UsageError(f"cannot be read as rollouts: {error}", where=str(file), fix=fix)


def _own_step(table: Any) -> Step:
    """Converts the rows of one step.

    Raises:
        ValueError: the numbers of tokens and log-probs of a sequence differ, or a value is null.
    """
    import pyarrow as pa

    rows = current(table).select(_COLUMNS).cast(pa.schema([SCHEMA.field(name) for name in _COLUMNS]))
    lists = {name: rows.column(name).combine_chunks() for name in _COLUMNS[4:]}
    sizes = {name: np.diff(values.offsets.to_numpy()).astype(np.int64) for name, values in lists.items()}
    if any(not np.array_equal(sizes["sampled"], of_column) for of_column in sizes.values()):
        raise ValueError(f"step {rows['step'][0]}: a sequence has more or fewer log-probs than tokens")
    flat = {name: values.flatten().to_numpy(zero_copy_only=False) for name, values in lists.items()}
    sampled = flat["sampled"].astype(bool)
    sequence = np.repeat(np.arange(len(rows)), sizes["sampled"])[sampled]
    episode_ids = rows.column("episode_id").to_numpy()
    first = np.flatnonzero(np.append(True, episode_ids[1:] != episode_ids[:-1]))
    in_sequences = np.bincount(sequence, minlength=len(rows))
    turn = flat["turn"][sampled]
    starts = np.append(True, (np.diff(turn) != 0) | (np.diff(sequence) != 0))[: len(turn)]
    return Step(
        number=rows.column("step")[0].as_py(),
        group_ids=rows.column("group_id").to_numpy()[first],
        rewards=rows.column("reward").to_numpy().astype(np.float64)[first],
        lengths=np.add.reduceat(in_sequences, first),
        rollout_log_probs=flat["rollout_log_probs"][sampled].astype(np.float32),
        log_probs=flat["training_log_probs"][sampled].astype(np.float32),
        sequence_lengths=in_sequences,
        turn_lengths=np.diff(np.append(np.flatnonzero(starts), len(turn))),
    )


# --- other frameworks -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DumpedRow:
    """One response; arrays are of all its tokens, of which `mask` were sampled by the policy."""

    prompt: bytes  # the prompt's token ids
    reward: float
    rollout_log_probs: NDArray[Any]
    log_probs: NDArray[Any]
    mask: NDArray[np.bool_]
    advantage: float | None


def _read_slime(files: Sequence[Path]) -> Iterator[Step]:
    """Reads `--save-debug-train-data` files (`torch.save`): one dict per sample (`samples`), or columns
    (`rollout_data`, written by miles and older slime; one file per rank, `<rollout>_<rank>.pt`)."""
    for number, of_step in groupby(files, key=_step_number):
        rows: dict[object, _DumpedRow] = {}
        for file in of_step:
            saved = _loaded(file)
            try:
                samples = saved["samples"] if "samples" in saved else _transposed(saved["rollout_data"])
                for place, sample in enumerate(samples):
                    # Tensor-parallel ranks save the same samples; `partition` is unique across ranks.
                    rows.setdefault(sample.get("partition", (file, place)), _slime_row(sample))
                step = _ragged(number, list(rows.values()))
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                what = f"is no slime training dump with both policies' log-probs: {error!r}"
                fix = "write it with --save-debug-train-data"
                raise UsageError(what, where=str(file), fix=fix) from error
        yield step


def _loaded(file: Path) -> Any:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling can raise any exception
        what = f"cannot be loaded as plain tensors: {type(error).__name__}"
        raise UsageError(what, where=str(file), fix="write it with --save-debug-train-data") from error


def _transposed(columns: dict[str, Any]) -> list[dict[str, Any]]:
    count = len(columns["response_lengths"])
    each = {
        name: values
        for name, values in columns.items()
        if hasattr(values, "__len__") and len(values) == count and not isinstance(values, str)
    }
    return [{name: values[row] for name, values in each.items()} for row in range(count)]


def _slime_row(sample: dict[str, Any]) -> _DumpedRow:
    length = int(sample["response_lengths"])
    tokens = _as_array(sample["tokens"]).astype(np.int64)
    mask = _as_array(sample["loss_masks"]).astype(bool) if "loss_masks" in sample else np.ones(length, bool)
    return _DumpedRow(
        prompt=tokens[: len(tokens) - length].tobytes(),
        reward=float(sample["rewards"]),
        rollout_log_probs=_as_array(sample["rollout_log_probs"]),
        log_probs=_as_array(sample["log_probs"]),
        mask=mask,
        advantage=_mean_of(sample.get("advantages"), mask),
    )


def _read_nemo(files: Sequence[Path]) -> Iterator[Step]:
    """Reads `train_data_step*.jsonl`: one response per line; the mask excludes prompt and padding."""
    for file in files:
        rows = []
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    rows.append(_nemo_row(json.loads(line)))
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    what = f"is no NeMo-RL training row with both policies' log-probs: {error!r}"
                    raise UsageError(what, where=f"{file}:{number}") from error
        try:
            step = _ragged(_step_number(file), rows)
        except ValueError as error:
            what = f"is no NeMo-RL training dump: {error}"
            raise UsageError(what, where=str(file)) from error
        if rows:
            yield step


def _nemo_row(row: dict[str, Any]) -> _DumpedRow:
    """Converts one line. NeMo-RL writes batches of size one, so every value is a list of one element."""

    def value(name: str) -> NDArray[Any]:
        return np.atleast_1d(np.squeeze(_as_array(row[name])))

    mask = value("token_loss_mask").astype(bool)
    sampled = np.flatnonzero(mask)
    first, last = (sampled[0], sampled[-1] + 1) if len(sampled) else (0, 0)
    tokens = value("token_ids").astype(np.int64)
    mask = mask & bool(value("sample_loss_mask")[0]) if "sample_loss_mask" in row else mask
    response = slice(first, last)
    reward = value("filtered_rewards" if "filtered_rewards" in row else "rewards")[0]
    return _DumpedRow(
        prompt=tokens[:first].tobytes(),
        reward=float(reward),
        rollout_log_probs=value("generation_logprobs")[response],
        log_probs=value("prev_logprobs")[response],
        mask=mask[response],
        advantage=_mean_of(value("advantages")[response] if "advantages" in row else None, mask[response]),
    )


def _as_array(values: Any) -> NDArray[Any]:
    """Converts a list, array or tensor of any precision to an array."""
    if hasattr(values, "detach"):  # NumPy has no bfloat16
        values = values.detach().float() if values.is_floating_point() else values.detach()
    return np.asarray(values)


def _mean_of(per_token: Any, mask: NDArray[np.bool_]) -> float | None:
    """Mean of a response's token advantages."""
    if per_token is None:
        return None
    values = _as_array(per_token)
    if values.ndim == 0 or len(values) == 1:
        return float(values.reshape(-1)[0])
    return float(values[mask].mean()) if mask.any() else 0.0


def _ragged(number: int, rows: list[_DumpedRow]) -> Step:
    """Combines rows into one step; responses to the same prompt tokens form a group.

    Raises:
        ValueError: a row's arrays differ in length.
    """
    for place, row in enumerate(rows):
        lengths = {len(row.rollout_log_probs), len(row.log_probs), len(row.mask)}
        if len(lengths) > 1:
            raise ValueError(f"row {place}: token arrays of lengths {sorted(lengths)}")
    groups: dict[bytes, int] = {}
    ids = [groups.setdefault(row.prompt, len(groups)) for row in rows]
    given = [row.advantage for row in rows if row.advantage is not None]

    def flat(name: str) -> NDArray[Any]:
        parts = [getattr(row, name)[row.mask] for row in rows]
        return np.asarray(np.concatenate([np.empty(0), *parts]), np.float32)

    return Step(
        number=number,
        group_ids=np.array(ids, np.int64),
        rewards=np.array([row.reward for row in rows], np.float64),
        lengths=np.array([row.mask.sum() for row in rows], np.int64),
        rollout_log_probs=flat("rollout_log_probs"),
        log_probs=flat("log_probs"),
        advantages=np.array(given) if len(given) == len(rows) else None,
    )


#: Per layout: whether it has a file of this name, and its reader.
_LAYOUTS: tuple[tuple[Callable[[Path], bool], Callable[[Sequence[Path]], Iterator[Step]]], ...] = (
    (lambda file: file.suffix == ".parquet" and file.name.startswith("rollouts-"), _read_own),
    (lambda file: file.suffix == ".pt" and file.stem.split("_")[0].isdecimal(), _read_slime),
    (lambda file: bool(re.fullmatch(r"train_data_step\d+\.jsonl", file.name)), _read_nemo),
)
