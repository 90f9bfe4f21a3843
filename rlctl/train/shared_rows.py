"""Gathers rows within sequence-parallel groups: every rank gets the rows of all ranks of its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rlctl.batch import Rollouts
from rlctl.reward.protocol import RewardResult

if TYPE_CHECKING:
    from rlctl.engine.sequence_parallel import SequenceParallel


def shared_rollouts(sequence: SequenceParallel | None, rollouts: Rollouts, mini_batches: int) -> Rollouts:
    """The group's rollouts, ordered by mini-batch, then by rank; unchanged without a group.

    Args:
        sequence: the group; None without sequence parallelism.
        rollouts: this rank's; every rank has the same number of rows.
        mini_batches: number of mini-batches in every rank's rows.
    """
    if sequence is None:
        return rollouts
    parts = sequence.exchange(rollouts.to("cpu"))
    share = len(rollouts.responses) // mini_batches
    starts = range(0, len(rollouts.responses), share)
    joined = Rollouts.joined([part.pick(slice(start, start + share)) for start in starts for part in parts])
    return joined.to(rollouts.responses.device)


def shared_rewards(
    sequence: SequenceParallel | None, rewards: RewardResult, mini_batches: int
) -> RewardResult:
    """The group's grades, in the order of `shared_rollouts`."""
    if sequence is None:
        return rewards
    device, rows = rewards.scores.device, len(rewards.scores)
    parts = sequence.exchange(_to(rewards, "cpu"))
    order = torch.arange(rows * len(parts)).view(len(parts), mini_batches, -1).transpose(0, 1).flatten()
    terms = list(dict.fromkeys(term for part in parts for term in part.parts))
    nothing = torch.full((rows,), torch.nan)
    joined = RewardResult(
        torch.cat([part.scores for part in parts])[order],
        torch.cat([part.valid for part in parts])[order],
        {term: torch.cat([part.parts.get(term, nothing) for part in parts])[order] for term in terms},
        [error for part in parts for error in part.errors],
        dict(_added(part.errors_by_term for part in parts)),
        dict(_added(part.timeouts for part in parts)),
    )
    return _to(joined, device)


def _added(counts: Iterable[dict[Any, int]]) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for each in counts:
        total.update(each)
    return total


def _to(rewards: RewardResult, device: torch.device | str) -> RewardResult:
    parts = {term: scores.to(device) for term, scores in rewards.parts.items()}
    return replace(rewards, scores=rewards.scores.to(device), valid=rewards.valid.to(device), parts=parts)
