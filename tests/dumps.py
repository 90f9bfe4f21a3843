"""Rows of `rollouts/*.parquet` as a run writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlctl.track.rollouts import SCHEMA

#: Per-token columns → their value where a token was not sampled.
LISTS = {
    "sampled": False,
    "turn": -1,
    "versions": -1,
    "rollout_log_probs": None,
    "training_log_probs": None,
    "rollout_is_weights": None,
    "keep_mask": False,
}


def dumped(
    token_ids: Sequence[int],
    rollout_log_probs: Sequence[float],
    training_log_probs: Sequence[float],
    *,
    prompt_ids: Sequence[int] = (),
    **given: Any,
) -> dict[str, Any]:
    """One sequence of one turn: a prompt, and sampled tokens with these log-probs."""
    count, before = len(token_ids), len(prompt_ids)
    of_sampled: Mapping[str, list[Any]] = {
        "sampled": [True] * count,
        "turn": [0] * count,
        "versions": [0] * count,
        "rollout_log_probs": list(rollout_log_probs),
        "training_log_probs": list(training_log_probs),
        "rollout_is_weights": [1.0] * count,
        "keep_mask": [True] * count,
    }
    row: dict[str, Any] = {"token_ids": [*prompt_ids, *token_ids]}
    for name, fill in LISTS.items():
        row[name] = [fill] * before + list(given.pop(name, of_sampled[name]))
    row |= {"step": 1, "policy_version": 0, "group_id": 0, "member": 0, "sequence": 0, "num_turns": 1}
    row |= {"data_source": "", "prompt": "", "response": "", "ground_truth": "", "reward": 1.0}
    row |= {"stop_reason": "completed", "truncated": False} | given
    return {"episode_id": f"{row['step']}/{row['group_id']}/{row['member']}"} | row


def conversation(**given: Any) -> dict[str, Any]:
    """A sequence of two turns of two and one tokens, with a tool's answer of one token between them."""
    row = dumped([5, 6, 7, 8], [-1.0] * 4, [-1.5] * 4, prompt_ids=[3, 4], num_turns=2, **given)
    for name, fill in LISTS.items():
        row[name][4] = fill
    row["turn"][5] = 1
    return row


def write(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    """The rows as one part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, **options)
    return path
