"""Splits a step into padded tensors of whole groups; computes advantages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlctl.algos import advantages as outcome_advantages
from rlctl.what_if.moments import Chunk
from rlctl.what_if.step import Step

#: Padded tokens per chunk. Bounds the memory used in addition to the rows of one step.
CHUNK_TOKENS = 1 << 18
#: Maximum number of tokens of pooled steps.
POOL_TOKENS = 1 << 22
#: Groups per chunk. Each group temporarily has a dense surrogate gradient.
CHUNK_GROUPS = 512


def pooled(steps: Iterable[Step], groups: int) -> Iterator[Step]:
    """Merges consecutive steps until they contain `groups` prompt groups or `POOL_TOKENS` tokens."""
    held: list[Step] = []
    for step in steps:
        if not len(step.token_ids):
            continue
        held.append(step)
        count = sum(len(np.unique(one.group_ids)) for one in held)
        if count >= groups or sum(len(one.token_ids) for one in held) >= POOL_TOKENS:
            yield _merged(held)
            held = []
    if held:
        yield _merged(held)


def _merged(steps: list[Step]) -> Step:
    """Merges steps into one; groups of different steps get different ids."""
    if len(steps) == 1:
        return steps[0]
    ids, start = [], 0
    for step in steps:
        _, numbers = np.unique(step.group_ids, return_inverse=True)
        ids.append(numbers + start)
        start += int(numbers.max()) + 1
    masks = [np.ones(len(one.token_ids), np.bool_) if one.mask is None else one.mask for one in steps]
    names = ("rewards", "lengths", "token_ids", "rollout_log_probs", "log_probs", "advantages")
    joined = {name: np.concatenate([getattr(one, name) for one in steps]) for name in names}
    return Step(steps[0].number, np.concatenate(ids), mask=np.concatenate(masks), **joined)


def whole_groups(step: Step) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields (rows, group number of each row) per chunk; the rows of a group are adjacent, never split."""
    _, numbers = np.unique(step.group_ids, return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    ends = np.flatnonzero(np.diff(numbers[order])) + 1
    rows, count = order[:0], 0
    for group in np.split(order, ends):
        ahead = np.concatenate([rows, group])
        is_full = count == CHUNK_GROUPS or step.lengths[ahead].max() * len(ahead) > CHUNK_TOKENS
        if count and is_full:
            yield rows, numbers[rows]
            ahead, count = group, 0
        rows, count = ahead, count + 1
    yield rows, numbers[rows]


def pad(step: Step, rows: NDArray[np.int64], groups: NDArray[np.int64], blocks: NDArray[np.int64]) -> Chunk:
    """Pads the rows of a step with advantages to (B, T) tensors; padding is zero."""
    assert step.advantages is not None
    starts = np.cumsum(step.lengths) - step.lengths
    lengths = step.lengths[rows]
    places = np.arange(max(lengths.max(), 1))
    inside = places < lengths[:, None]
    index = np.where(inside, starts[rows][:, None] + places, 0)

    def take(flat: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.where(inside, flat[index], flat.dtype.type(0)))

    return Chunk(
        log_probs=take(step.log_probs),
        rollout_log_probs=take(step.rollout_log_probs),
        mask=torch.from_numpy(inside) if step.mask is None else take(step.mask),
        token_ids=take(step.token_ids),
        advantages=torch.from_numpy(step.advantages[rows]),
        groups=torch.from_numpy(groups),
        blocks=torch.from_numpy(blocks),
    )


def advantages_of(step: Step, estimator: str, notes: list[str]) -> NDArray[np.float64]:
    """(B,) one advantage per response: from the dump, otherwise computed from the rewards.

    Uses the run's estimator if it is `rloo`, `grpo`, `dr_grpo` or `opo`, otherwise `rloo`. With one response
    per prompt, uses `rloo` over the whole step. Adds a note to `notes` if the estimator is replaced.
    """
    if step.advantages is not None:
        return np.nan_to_num(step.advantages)
    scores, groups = torch.tensor(step.rewards), torch.tensor(step.group_ids)
    valid = scores.isfinite()
    scores = scores.nan_to_num(0.0)
    if len(np.unique(step.group_ids)) == len(step.group_ids):
        notes.append("one response per prompt: advantages are rewards minus the step's mean")
        groups, estimator = torch.zeros_like(groups), "rloo"
    elif estimator not in ("rloo", "grpo", "dr_grpo", "opo"):
        notes.append(f"advantages of {estimator} are not in the dump: those of rloo are used")
    if estimator in ("grpo", "dr_grpo"):
        advantages = outcome_advantages.grpo(scores, groups, valid, divide_by_std=estimator == "grpo")
    elif estimator == "opo":
        lengths = torch.tensor(step.lengths)
        advantages = outcome_advantages.weighted_baseline(scores, lengths, groups, valid)
    else:
        advantages = outcome_advantages.rloo(scores, groups, valid)
    return np.asarray(advantages.double())
