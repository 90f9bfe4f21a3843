"""Reads dumps of slime, miles and NeMo-RL, one training step at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.errors import UsageError
from rlctl.what_if.step import Step


@dataclass(frozen=True, slots=True)
class _DumpedRow:
    """One response. `prompt` contains the prompt's token ids as bytes; the other fields are as in `Step`."""

    prompt: bytes
    reward: float
    token_ids: NDArray[np.int64]
    rollout_log_probs: NDArray[Any]
    log_probs: NDArray[Any]
    mask: NDArray[np.bool_]
    advantage: float | None


def step_of(file: Path) -> int:
    """First number in a file's name; 0 if there is none."""
    number = re.search(r"\d+", file.stem)
    return int(number[0]) if number else 0


# --- slime and miles ------------------------------------------------------------------------------


def read_slime(files: Sequence[Path]) -> Iterator[Step]:
    """Reads `--save-debug-train-data` files (`torch.save`): one dict per sample (`samples`), or columns
    (`rollout_data`, written by miles and older slime; one file per rank, `<rollout>_<rank>.pt`)."""
    for number, of_step in groupby(files, key=step_of):
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
        token_ids=tokens[len(tokens) - length :],
        rollout_log_probs=_as_array(sample["rollout_log_probs"]),
        log_probs=_as_array(sample["log_probs"]),
        mask=mask,
        advantage=_mean_of(sample.get("advantages"), mask),
    )


# --- NeMo-RL --------------------------------------------------------------------------------------


def read_nemo(files: Sequence[Path]) -> Iterator[Step]:
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
        if rows:
            yield _ragged(step_of(file), rows)


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
        token_ids=tokens[response],
        rollout_log_probs=value("generation_logprobs")[response],
        log_probs=value("prev_logprobs")[response],
        mask=mask[response],
        advantage=_mean_of(value("advantages")[response] if "advantages" in row else None, mask[response]),
    )


# --- both -----------------------------------------------------------------------------------------


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
        lengths = {len(row.token_ids), len(row.rollout_log_probs), len(row.log_probs), len(row.mask)}
        if len(lengths) > 1:
            raise ValueError(f"row {place}: token arrays of lengths {sorted(lengths)}")
    groups: dict[bytes, int] = {}
    ids = [groups.setdefault(row.prompt, len(groups)) for row in rows]
    given = [row.advantage for row in rows if row.advantage is not None]

    def flat(name: str, kind: type) -> NDArray[Any]:
        parts = [np.empty(0, kind), *(getattr(row, name) for row in rows)]
        return np.asarray(np.concatenate(parts), kind)

    return Step(
        number=number,
        group_ids=np.array(ids, np.int64),
        rewards=np.array([row.reward for row in rows], np.float64),
        lengths=np.array([len(row.token_ids) for row in rows], np.int64),
        token_ids=flat("token_ids", np.int64),
        rollout_log_probs=flat("rollout_log_probs", np.float32),
        log_probs=flat("log_probs", np.float32),
        mask=flat("mask", np.bool_),
        advantages=np.array(given) if len(given) == len(rows) else None,
    )
