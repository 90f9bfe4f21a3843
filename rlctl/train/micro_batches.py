"""Divides a mini-batch into forward passes (parts).

Parts are consecutive episodes, because siblings share the computation of their prompt. Episodes without
gradient come first, so that their forward passes need no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.engine.layout import idle_inputs

if TYPE_CHECKING:
    from rlctl.batch import ModelInputs, TokenBatch
    from rlctl.engine.ranks import Ranks


def micro_batches(
    batch: TokenBatch, sequences: int, max_tokens: int | None, *, first: Tensor | None = None
) -> list[Tensor]:
    """Indices (k,) of the episodes of each part; every episode is in exactly one part.

    Args:
        sequences: most sequences of a part if `max_tokens` is None; an episode is never divided.
        max_tokens: most tokens of a part; a longer episode is a part of its own.
        first: (E,) bool, episodes that the first parts contain, without others. None: any order.
    """
    of_episodes = batch.sequences_of_episodes
    sizes = of_episodes.lengths if max_tokens is None else of_episodes.sum(batch.lengths)
    limit = sequences if max_tokens is None else max_tokens
    flags = [False] * batch.num_episodes if first is None else first.tolist()
    parts: list[list[int]] = []
    for which in (True, False):
        total, start = limit + 1, len(parts)
        for place, size in enumerate(sizes.tolist()):
            if flags[place] is which:
                total += size
                if total > limit or len(parts) == start:
                    parts.append([])
                    total = size
                parts[-1].append(place)
    return [torch.tensor(part, device=batch.group_ids.device) for part in parts]


def num_passes(num_parts: int, ranks: Ranks) -> int:
    """Passes of every rank, at least one: the most parts of any rank (all ranks call this)."""
    return int(ranks.max(float(max(num_parts, 1))))


def in_step(parts: Sequence[TokenBatch], ranks: Ranks) -> list[TokenBatch | None]:
    """The parts, followed by None, an idle pass, until all ranks have the same number, at least one.

    Under ZeRO a forward or backward pass is a collective.
    """
    return [*parts, *[None] * (num_passes(len(parts), ranks) - len(parts))]


@torch.no_grad()
def in_passes(
    model: Callable[[ModelInputs], Tensor],
    batch: TokenBatch,
    sequences: int,
    max_tokens: int | None,
    ranks: Ranks,
) -> Tensor:
    """Outputs of `model` for all tokens, part by part, without gradient: (M, …) in the order of the batch."""
    parts, found = micro_batches(batch, sequences, max_tokens), []
    for part in in_step([batch.pick(episodes) for episodes in parts], ranks):
        output = model(part.inputs if part else idle_inputs(batch.token_ids.device))
        found.append(output if part else output[:0])
    return torch.cat(found)
