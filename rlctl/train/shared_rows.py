"""Gathers rows within sequence-parallel groups: every rank gets the rows of all ranks of its group."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

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
    parts = sequence.exchange(rewards)
    rows = torch.arange(len(rewards.scores) * len(parts))
    order = rows.view(len(parts), mini_batches, -1).transpose(0, 1).flatten()
    return RewardResult(
        torch.cat([part.scores for part in parts])[order],
        torch.cat([part.valid for part in parts])[order],
        {term: torch.cat([part.parts[term] for part in parts])[order] for term in rewards.parts},
        [error for part in parts for error in part.errors],
        sum((Counter(part.errors_by_term) for part in parts), Counter()),
        sum((Counter(part.timeouts) for part in parts), Counter()),
    )
