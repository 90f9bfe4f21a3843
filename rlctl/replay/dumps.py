"""Dumped rollouts of rlctl, slime, miles and NeMo-RL, one training step at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.errors import UsageError
from rlctl.track.rollouts import ROLLOUTS_DIR

Layout = Literal["rlctl", "slime", "NeMo-RL"]

_NEMO = re.compile(r"train_data_step(\d+)\.jsonl")
_COLUMNS = ["step", "group_id", "reward", "response_ids", "rollout_log_probs", "training_log_probs"]
_ROWS_AT_ONCE = 512
_FIX = (
    "name a run directory with rollouts/*.parquet (kept with trainer.rollouts_per_step), slime's "
    "train_data/*.pt or NeMo-RL's train_data_step*.jsonl"
)


@dataclass(frozen=True, slots=True)
class Step:
    """B responses one training step used; token arrays are flat, row after row, N = Σ lengths.

    Attributes:
        number: the step.
        group_ids: (B,) int64, equal for responses to one prompt.
        rewards: (B,), NaN where the grader failed.
        lengths: (B,) int64, response tokens.
        token_ids: (N,) int64.
        rollout_log_probs, log_probs: (N,) float32, nats, of the sampling and the trained policy.
        mask: (N,) bool, False for tokens the policy did not sample (tool output); None: all sampled.
        advantages: (B,), where the dump has them; None: to be computed from the rewards.
    """

    number: int
    group_ids: NDArray[np.int64]
    rewards: NDArray[np.float64]
    lengths: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    rollout_log_probs: NDArray[np.float32]
    log_probs: NDArray[np.float32]
    mask: NDArray[np.bool_] | None = None
    advantages: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class Dump:
    """Files of one layout in the order of their steps.

    Attributes:
        layout: who wrote them.
        files: at least one.
    """

    layout: Layout
    files: tuple[Path, ...]

    def steps(self) -> Iterator[Step]:
        """Read on, holding one step at a time.

        Raises:
            UsageError: a file cannot be read or lacks what a replay needs.
        """
        return _READERS[self.layout](self.files)


def find_dump(path: Path) -> Dump:
    """Recognise what a file or directory holds.

    Raises:
        UsageError: no dumped rollouts are there.
    """
    if not path.exists():
        raise UsageError("no such file or directory", where=str(path), fix=_FIX)
    places = [path, path / ROLLOUTS_DIR, path / "train_data"] if path.is_dir() else [path]
    for place in places:
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        for layout, belongs in _BELONGS.items():
            chosen = [file for file in files if belongs(file)]
            if chosen:
                return Dump(layout, tuple(sorted(chosen, key=_step_of)))
    raise UsageError("no dumped rollouts found", where=str(path), fix=_FIX)


_BELONGS: dict[Layout, Callable[[Path], bool]] = {
    "rlctl": lambda file: file.suffix == ".parquet" and file.name.startswith("rollouts-"),
    "slime": lambda file: file.suffix == ".pt" and file.stem.split("_")[0].isdigit(),
    "NeMo-RL": lambda file: bool(_NEMO.fullmatch(file.name)),
}


def _step_of(file: Path) -> tuple[int, str]:
    """File names order as text what steps order as numbers."""
    number = re.search(r"\d+", file.stem)
    return (int(number[0]) if number else 0, file.name)


# --- rlctl ----------------------------------------------------------------------------------------


def _read_own(files: Sequence[Path]) -> Iterator[Step]:
    """`rollouts-*.parquet` (`rlctl.track.rollouts.SCHEMA`); a step lies in one part, its rows together."""
    import pyarrow as pa

    for file in files:
        held: list[Any] = []
        for batch in _batches(file):
            steps = batch.column("step").to_numpy(zero_copy_only=False)
            cuts = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
            for start, stop in pairwise(cuts):
                piece = batch.slice(start, stop - start)
                if held and held[0].column("step")[0] != piece.column("step")[0]:
                    yield _own_step(pa.Table.from_batches(held).combine_chunks())
                    held = []
                held.append(piece)
        if held:
            yield _own_step(pa.Table.from_batches(held).combine_chunks())


def _batches(file: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            missing = [name for name in _COLUMNS if name not in parquet.schema_arrow.names]
            if missing:
                raise UsageError(f"no column {', '.join(missing)}", where=str(file), fix=_FIX)
            yield from (
                batch for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=_COLUMNS) if batch.num_rows
            )
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"cannot be read as Parquet: {error}", where=str(file)) from error


def _own_step(table: Any) -> Step:
    """One step's rows, already in one chunk."""

    def flat(name: str, kind: type) -> tuple[NDArray[Any], NDArray[np.int64]]:
        column = table.column(name).combine_chunks()
        values = column.flatten().to_numpy(zero_copy_only=False).astype(kind, copy=False)
        return values, np.diff(column.offsets.to_numpy()).astype(np.int64)

    token_ids, lengths = flat("response_ids", np.int64)
    return Step(
        number=table.column("step")[0].as_py(),
        group_ids=table.column("group_id").to_numpy(),
        rewards=table.column("reward").to_numpy().astype(np.float64),
        lengths=lengths,
        token_ids=token_ids,
        rollout_log_probs=flat("rollout_log_probs", np.float32)[0],
        log_probs=flat("training_log_probs", np.float32)[0],
    )


# --- slime and miles ------------------------------------------------------------------------------


def _read_slime(files: Sequence[Path]) -> Iterator[Step]:
    """`--save-debug-train-data` (`torch.save`): one dict per sample (`samples`), or columns
    (`rollout_data`, as miles and older slime write; one file per rank)."""
    import torch

    for file in files:
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # unpickling raises whatever it likes
            what = f"cannot be loaded as plain tensors: {type(error).__name__}"
            raise UsageError(what, where=str(file), fix=_FIX) from error
        try:
            samples = saved["samples"] if "samples" in saved else _transposed(saved["rollout_data"])
            yield _ragged(int(saved["rollout_id"]), [_slime_row(sample) for sample in samples])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            what = f"is no slime training dump with both policies' log-probs: {error!r}"
            raise UsageError(what, where=str(file), fix="write it with --save-debug-train-data") from error


def _transposed(columns: dict[str, Any]) -> list[dict[str, Any]]:
    count = len(columns["response_lengths"])
    each = {
        name: values
        for name, values in columns.items()
        if hasattr(values, "__len__") and len(values) == count and not isinstance(values, str)
    }
    return [{name: values[row] for name, values in each.items()} for row in range(count)]


def _slime_row(sample: dict[str, Any]) -> _Row:
    length = int(sample["response_lengths"])
    tokens = _array(sample["tokens"]).astype(np.int64)
    mask = _array(sample["loss_masks"]).astype(bool) if "loss_masks" in sample else np.ones(length, bool)
    return _Row(
        prompt=tokens[: len(tokens) - length].tobytes(),
        reward=float(sample["rewards"]),
        token_ids=tokens[len(tokens) - length :],
        rollout_log_probs=_array(sample["rollout_log_probs"]),
        log_probs=_array(sample["log_probs"]),
        mask=mask,
        advantage=_mean(sample.get("advantages"), mask),
    )


# --- NeMo-RL --------------------------------------------------------------------------------------


def _read_nemo(files: Sequence[Path]) -> Iterator[Step]:
    """`train_data_step*.jsonl`: one response per line, prompt and padding included, masked out."""
    for file in files:
        rows = []
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    rows.append(_nemo_row(json.loads(line)))
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    what = f"is no NeMo-RL training row with both policies' log-probs: {error!r}"
                    raise UsageError(what, where=f"{file}:{number}") from error
        if rows:
            yield _ragged(_step_of(file)[0], rows)


def _nemo_row(row: dict[str, Any]) -> _Row:
    """Batches of one are written, so every value is a list of one."""

    def value(name: str) -> NDArray[Any]:
        return np.atleast_1d(np.squeeze(_array(row[name])))

    mask = value("token_loss_mask").astype(bool)
    sampled = np.flatnonzero(mask)
    first, last = (sampled[0], sampled[-1] + 1) if len(sampled) else (0, 0)
    tokens = value("token_ids").astype(np.int64)
    mask = mask & bool(value("sample_loss_mask")[0]) if "sample_loss_mask" in row else mask
    response = slice(first, last)
    reward = value("filtered_rewards" if "filtered_rewards" in row else "rewards")[0]
    return _Row(
        prompt=tokens[:first].tobytes(),
        reward=float(reward),
        token_ids=tokens[response],
        rollout_log_probs=value("generation_logprobs")[response],
        log_probs=value("prev_logprobs")[response],
        mask=mask[response],
        advantage=_mean(value("advantages")[response] if "advantages" in row else None, mask[response]),
    )


# --- rows of any layout ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: bytes
    reward: float
    token_ids: NDArray[np.int64]
    rollout_log_probs: NDArray[Any]
    log_probs: NDArray[Any]
    mask: NDArray[np.bool_]
    advantage: float | None


def _array(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):  # NumPy knows no bfloat16
        values = values.detach().float() if values.is_floating_point() else values.detach()
    return np.asarray(values)


def _mean(per_token: Any, mask: NDArray[np.bool_]) -> float | None:
    """One advantage per response: the mean over its tokens."""
    if per_token is None:
        return None
    values = _array(per_token)
    if values.ndim == 0 or len(values) == 1:
        return float(values.reshape(-1)[0])
    return float(values[mask].mean()) if mask.any() else 0.0


def _ragged(number: int, rows: list[_Row]) -> Step:
    """Rows as one step; responses to the same prompt tokens are siblings.

    Raises:
        ValueError: a row's arrays differ in length.
    """
    for place, row in enumerate(rows):
        lengths = {len(row.token_ids), len(row.rollout_log_probs), len(row.log_probs), len(row.mask)}
        if len(lengths) > 1:
            raise ValueError(f"row {place}: token arrays of lengths {sorted(lengths)}")
    groups: dict[bytes, int] = {}
    ids = [groups.setdefault(row.prompt, len(groups)) for row in rows]
    given = [row.advantage for row in rows if row.advantage is not None]

    def flat(parts: Iterator[NDArray[Any]], kind: type) -> NDArray[Any]:
        joined: NDArray[Any] = np.concatenate([np.empty(0, kind), *chain(parts)]).astype(kind, copy=False)
        return joined

    return Step(
        number=number,
        group_ids=np.array(ids, np.int64),
        rewards=np.array([row.reward for row in rows], np.float64),
        lengths=np.array([len(row.token_ids) for row in rows], np.int64),
        token_ids=flat((row.token_ids for row in rows), np.int64),
        rollout_log_probs=flat((row.rollout_log_probs for row in rows), np.float32),
        log_probs=flat((row.log_probs for row in rows), np.float32),
        mask=flat((row.mask for row in rows), np.bool_),
        advantages=np.array(given) if len(given) == len(rows) else None,
    )


_READERS: dict[Layout, Callable[[Sequence[Path]], Iterator[Step]]] = {
    "rlctl": _read_own,
    "slime": _read_slime,
    "NeMo-RL": _read_nemo,
}
