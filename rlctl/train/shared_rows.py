"""Gathers rows within sequence-parallel groups: every rank gets the rows of all ranks of its group."""

from __future__ import annotations

from dataclasses import replace
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
    whole = RewardResult.joined(parts)
    rows = torch.arange(len(whole.scores))
    ordered = whole.pick(rows.view(len(parts), mini_batches, -1).transpose(0, 1).flatten())
    return replace(whole, scores=ordered.scores, valid=ordered.valid, parts=ordered.parts)
