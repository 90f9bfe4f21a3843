"""Columns of both log-probs in files of tokens: rollouts of a run, or what another program wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
import torch

from rlctl.errors import UsageError, first_line

#: Names that programs give the log-probs that the sampler reported, those of the trained policy before its
#: updates, and what marks the tokens that were sampled; the first that a file has is read. Those of verl are
#: `rollout_log_probs`, `old_log_probs`, `response_mask`; of TRL `sampling_per_token_logps`,
#: `old_per_token_logps`, `completion_mask`; of slime `rollout_log_probs`, `log_probs`, `loss_masks`.
REPORTED = (
    *("rollout_log_probs", "rollout_logprobs", "sampling_log_probs", "sampling_logps"),
    *("sampling_per_token_logps", "generation_logprobs", "inference_logprobs", "behavior_logprobs"),
)
TRAINED = (
    *("training_log_probs", "old_log_probs", "old_logprobs", "old_per_token_logps", "train_log_probs"),
    *("trainer_logprobs", "prev_logprobs", "log_probs"),
)
MASKS = ("sampled", "response_mask", "completion_mask", "loss_mask", "loss_masks", "token_mask", "mask")
#: Of a column with one value per token, or per response → what the table calls it.
_KINDS = {"versions": "version", "turn": "turn", "replica": "replica", "data_source": "source"}
#: Endings of files that can be read.
ENDINGS = (".parquet", ".jsonl", ".pt")
#: Upper ends of the places in a response that the table distinguishes.
_PLACES = (1, 16, 128, 1024)
FIX = "name a run with rollouts (trainer.rollouts_per_step), or a file with two columns of log-probs"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one batch, in the order of their responses: all columns have one entry per token."""

    step: int
    log_ratio: np.ndarray[Any, Any]  # log π_train − log π_reported, nats
    groups: dict[str, np.ndarray[Any, Any]]  # version, place, turn, replica, source: as text
    num_unscored: int  # further tokens that were drawn, without a log-prob of the trained policy


def tokens_of(files: Sequence[Path], first_groups: float) -> Iterator[Tokens]:
    """The tokens of each step; of files without steps one batch per file.

    Args:
        first_groups: groups with this number or a higher one are left out.

    Raises:
        UsageError: a file cannot be read, or a column is missing or has another number of tokens.
    """
    for number, file in enumerate(files):
        table = _table(file)
        reported, trained = (_chosen(table.column_names, names, file) for names in (REPORTED, TRAINED))
        mask = next((name for name in MASKS if name in table.column_names), None)
        if "group_id" in table.column_names:
            table = table.filter(pa.compute.less(table["group_id"], first_groups))
        has_steps = "step" in table.column_names
        steps = table["step"].to_numpy() if has_steps else np.full(len(table), number)
        for step in np.unique(steps):
            rows = table.filter(pa.array(steps == step))
            tokens = _tokens(rows, int(step), reported, trained, mask, file)
            if len(tokens.log_ratio):
                yield tokens


def _table(file: Path) -> pa.Table:
    try:
        if file.suffix == ".jsonl":
            return pyarrow.json.read_json(file)
        return _of_torch(file) if file.suffix == ".pt" else pq.read_table(file)
    except UsageError:
        raise
    except Exception as error:  # torch's reader raises errors of many kinds
        raise UsageError(f"cannot be read: {first_line(error)}", where=str(file), fix=FIX) from error


def _of_torch(file: Path) -> pa.Table:
    """The samples of a file of slime's `--save-debug-train-data`, which runs no code when it is read.

    Raises:
        UsageError: it has no list of samples.
    """
    stored = torch.load(file, map_location="cpu", weights_only=True)
    samples = stored.get("samples") if isinstance(stored, dict) else None
    if not isinstance(samples, list) or not samples or not isinstance(samples[0], dict):
        raise UsageError("it has no `samples`, as slime's --save-debug-train-data writes", where=str(file))
    columns: dict[str, Any] = {}
    for name in (*REPORTED, *TRAINED, *MASKS):
        if name in samples[0]:
            columns[name] = [_numbers(sample.get(name)) for sample in samples]
    step = stored.get("rollout_id")
    return pa.table({**columns, "step": [step if isinstance(step, int) else 0] * len(samples)})


def _numbers(values: Any) -> list[float]:
    return [] if values is None else torch.as_tensor(values).float().flatten().tolist()


def _chosen(columns: list[str], names: Sequence[str], file: Path) -> str:
    for name in names:
        if name in columns:
            return name
    message = f"no column of log-probs: it needs one of {', '.join(names)}; it has {', '.join(columns)}"
    raise UsageError(message, where=str(file), fix="rename a column")


def _tokens(rows: pa.Table, step: int, reported: str, trained: str, mask: str | None, file: Path) -> Tokens:
    """The sampled tokens of some rows, a list of tokens each, or one token each."""
    if not pa.types.is_list(rows.schema.field(reported).type):
        lengths = np.ones(len(rows), np.int64)
    else:
        lengths = np.array([len(value or ()) for value in rows[reported].to_pylist()], np.int64)

    def flat(name: str) -> np.ndarray[Any, Any]:
        column = rows[name].combine_chunks()
        values = column.flatten() if pa.types.is_list(column.type) else column
        numbers: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
        if len(numbers) != lengths.sum():
            message = f"{name} has {len(numbers):,} entries, {reported} has {int(lengths.sum()):,}"
            raise UsageError(message, where=f"{file}, step {step}", fix="give both one entry per token")
        return numbers

    own, theirs = (flat(name).astype(np.float64) for name in (trained, reported))
    drawn = ~np.isnan(theirs)
    if mask is not None:
        drawn &= flat(mask).astype(bool)
    chosen = drawn & ~np.isnan(own)
    row = np.repeat(np.arange(len(rows)), lengths)
    groups = {"place": _places(chosen, row)[chosen]}
    for name, kind in _KINDS.items():
        if name in rows.column_names:
            is_list = pa.types.is_list(rows.schema.field(name).type)
            per_token = flat(name) if is_list else np.array(rows[name].to_pylist())[row]
            groups[kind] = per_token[chosen].astype(str)
    with np.errstate(invalid="ignore"):  # −∞ − (−∞)
        gap = own - theirs
    return Tokens(step, gap[chosen], groups, int(drawn.sum() - chosen.sum()))


def _places(chosen: np.ndarray[Any, Any], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """For each token the part of its response that it is in; `row` is ascending."""
    before = np.cumsum(chosen) - chosen  # sampled tokens before it, in all rows
    place = before - before[np.searchsorted(row, row)]
    names = ["first token", *(f"to {end}" for end in _PLACES[1:]), f"after {_PLACES[-1]}"]
    parts: np.ndarray[Any, Any] = np.array(names)[np.searchsorted(_PLACES, place, side="right")]
    return parts
