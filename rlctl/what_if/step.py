"""The responses of one training step, independent of the dump's format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Step:
    """The B responses of one training step; token arrays concatenate the rows, N = Σ lengths."""

    number: int  # number of the step
    group_ids: NDArray[np.int64]  # (B,) int64, equal for responses to one prompt
    rewards: NDArray[np.float64]  # (B,), NaN where the grader failed
    lengths: NDArray[np.int64]  # (B,) int64, response tokens
    token_ids: NDArray[np.int64]  # (N,) int64
    #: rollout_log_probs, log_probs: (N,) float32, nats, of the sampling and the trained policy
    rollout_log_probs: NDArray[np.float32]
    log_probs: NDArray[np.float32]
    #: (N,) bool, False for tokens the policy did not sample (tool output); None: all sampled
    mask: NDArray[np.bool_] | None = None
    #: (B,) from the dump; None: computed from the rewards
    advantages: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class DumpedRow:
    """One response. `prompt` contains the prompt's token ids as bytes; the other fields are as in `Step`."""

    prompt: bytes
    reward: float
    token_ids: NDArray[np.int64]
    rollout_log_probs: NDArray[Any]
    log_probs: NDArray[Any]
    mask: NDArray[np.bool_]
    advantage: float | None


def as_array(values: Any) -> NDArray[Any]:
    """Converts a list, array or tensor of any precision to an array."""
    if hasattr(values, "detach"):  # NumPy has no bfloat16
        values = values.detach().float() if values.is_floating_point() else values.detach()
    return np.asarray(values)


def mean_of(per_token: Any, mask: NDArray[np.bool_]) -> float | None:
    """Mean of a response's token advantages."""
    if per_token is None:
        return None
    values = as_array(per_token)
    if values.ndim == 0 or len(values) == 1:
        return float(values.reshape(-1)[0])
    return float(values[mask].mean()) if mask.any() else 0.0


def ragged(number: int, rows: list[DumpedRow]) -> Step:
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
