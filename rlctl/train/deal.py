"""Divides the episodes of a step: among ranks, into mini-batches, and each into forward passes (parts).

Every rank gets about the same number of tokens. Within each mini-batch whole groups are dealt, because
siblings share the computation of their prompt, unless this leaves a rank with over `LARGEST` times the mean;
then episodes. The largest goes first, to the rank with the fewest tokens so far. Every rank computes the same
assignment from the sizes of all episodes.

Parts are consecutive episodes, so that siblings stay together. Episodes without gradient come first, so that
their forward passes need no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlctl.algos.segments import Segments
from rlctl.batch import ModelInputs, TokenBatch, TokenLists
from rlctl.engine.layout import idle_inputs
from rlctl.engine.ranks import Ranks

#: Largest share of a rank in a mini-batch, relative to the mean, at which groups are kept together.
LARGEST = 1.05


@dataclass(frozen=True, slots=True)
class Dealt:
    """An episode of any rank: what the assignment depends on, and the sizes of its columns."""

    mini: int
    group: int
    member: int
    source: int  # the rank that sampled it
    tokens: int
    prompt: int  # tokens that it shares with its siblings
    sampled: int
    sequences: int
    place: int  # index in its source's batch

    def entries(self, level: str) -> int:
        """Number of its entries in a column of a level, see `LEVELS`."""
        return {"episode": 1, "sequence": self.sequences, "token": self.tokens, "sampled": self.sampled}[
            level
        ]


def assigned(episodes: Sequence[Dealt], num_parts: int) -> list[int]:
    """The part, of `num_parts`, of every episode."""
    found: dict[tuple[int, int], int] = {}
    totals = [0] * num_parts  # of all mini-batches so far, which decide between equal parts
    for mini in sorted({one.mini for one in episodes}):
        some = [one for one in episodes if one.mini == mini]
        groups: dict[int, list[Dealt]] = {}
        for one in some:
            groups.setdefault(one.group, []).append(one)
        parts, loads = _dealt(list(groups.values()), totals)
        if max(loads) * num_parts > LARGEST * sum(loads):
            parts, loads = _dealt([[one] for one in some], totals)
        found |= parts
        totals = [sum(pair) for pair in zip(totals, loads, strict=True)]
    return [found[one.group, one.member] for one in episodes]


def _dealt(units: list[list[Dealt]], totals: list[int]) -> tuple[dict[tuple[int, int], int], list[int]]:
    """Part of each episode by group and member, and the tokens of each part."""
    loads, found = [0] * len(totals), dict[tuple[int, int], int]()

    def cost(unit: list[Dealt]) -> int:
        return sum(one.tokens for one in unit) - sum(one.prompt for one in unit[1:])

    for unit in sorted(units, key=lambda unit: (-cost(unit), unit[0].group, unit[0].member)):
        part = min(range(len(loads)), key=lambda part: (loads[part], totals[part], part))
        loads[part] += cost(unit)
        found |= {(one.group, one.member): part for one in unit}
    return found, loads


def deal(batch: TokenBatch, ranks: Ranks, groups_per_mini: int, group_size: int = 1) -> TokenBatch:
    """The episodes that this rank trains on, ordered by group and member (all ranks call this).

    Args:
        batch: the episodes that this rank sampled, on its device.
        groups_per_mini: prompts per mini-batch, over all ranks: group g belongs to mini-batch
            g // groups_per_mini.
        group_size: ranks of a sequence-parallel group, which all get the same episodes.
    """
    every = [one for part in ranks.exchange([_described(batch, ranks.rank, groups_per_mini)]) for one in part]
    parts = assigned(every, ranks.world_size // group_size)
    if ranks.world_size > 1:
        batch = _moved(batch, ranks, every, [[p * group_size + i for i in range(group_size)] for p in parts])
    keys = list(zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True))
    return batch.pick(sorted(range(batch.num_episodes), key=keys.__getitem__))


def _described(batch: TokenBatch, rank: int, groups_per_mini: int) -> list[Dealt]:
    sequences = batch.sequences_of_episodes
    prompts = (batch.sequences.lengths - batch.units.sequence.lengths).tolist()
    columns = (
        batch.group_ids.tolist(),
        batch.members.tolist(),
        sequences.sum(batch.lengths).long().tolist(),
        batch.units.episode.lengths.tolist(),
        sequences.lengths.tolist(),
        sequences.starts.tolist(),
    )
    return [
        Dealt(g // groups_per_mini, g, m, rank, tokens, prompts[start] if count else 0, sampled, count, place)
        for place, (g, m, tokens, sampled, count, start) in enumerate(zip(*columns, strict=True))
    ]


def _moved(batch: TokenBatch, ranks: Ranks, every: list[Dealt], takers: list[list[int]]) -> TokenBatch:
    """The episodes that arrive at this rank, in the order of their sources."""
    dealt, world = list(zip(every, takers, strict=True)), range(ranks.world_size)
    own = [(one, where) for one, where in dealt if one.source == ranks.rank]
    outgoing = [[one for one, where in own if rank in where] for rank in world]
    taken = [one for one, where in dealt if ranks.rank in where]
    incoming = [[one for one in taken if one.source == rank] for rank in world]

    def sizes(level: str) -> list[list[int]]:
        """Entries of a column that leave for each rank, and that arrive from it."""
        return [[sum(one.entries(level) for one in part) for part in parts] for parts in (outgoing, incoming)]

    def exchanged(values: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        return torch.cat(ranks.all_to_all(list(torch.split(values, leaving)), arriving))

    def moved(column: Tensor | TokenLists, level: str) -> Tensor | TokenLists:
        leaving, arriving = sizes(level)
        if isinstance(column, Tensor):
            return exchanged(column, leaving, arriving)
        counts = exchanged(column.counts, leaving, arriving)
        totals = (
            [int(part.sum()) for part in torch.split(column.counts, leaving)],
            [int(part.sum()) for part in torch.split(counts, arriving)],
        )
        log_probs = None if column.log_probs is None else exchanged(column.log_probs, *totals)
        return TokenLists(counts, exchanged(column.ids, *totals), log_probs)

    found = batch.pick([one.place for part in outgoing for one in part]).mapped(moved)
    counts = torch.tensor([one.sequences for one in taken], dtype=torch.int64)
    return replace(found, owners=Segments(counts).index.to(batch.owners.device))


# --- mini-batches and their forward passes ----------------------------------------------------------


def mini_batches(batch: TokenBatch, groups: int, count: int) -> list[Tensor]:
    """Indices (k,) of the episodes of each mini-batch, which has this number of prompts over all ranks."""
    return [(batch.group_ids // groups == number).nonzero().squeeze(1) for number in range(count)]


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


def in_step(batch: TokenBatch, sequences: int, max_tokens: int | None, ranks: Ranks) -> list[TokenBatch]:
    """The parts as batches, then empty ones until all ranks have the same number, at least one.

    Under ZeRO a forward or backward pass is a collective.
    """
    parts = [batch.pick(episodes) for episodes in micro_batches(batch, sequences, max_tokens)]
    return parts + [batch.pick([])] * (num_passes(len(parts), ranks) - len(parts))


def inputs_of(part: TokenBatch) -> ModelInputs:
    """The input of the pass over a part; over an empty one, an idle pass."""
    return part.inputs if part.num_episodes else idle_inputs(part.token_ids.device)


def output_of(model: Callable[[ModelInputs], Tensor], part: TokenBatch) -> Tensor:
    """(m, …): the output of a pass for the m sampled tokens of a part; none for those of an idle pass."""
    return model(inputs_of(part))[: len(part.turns)]


@torch.no_grad()
def in_passes(
    model: Callable[[ModelInputs], Tensor],
    batch: TokenBatch,
    sequences: int,
    max_tokens: int | None,
    ranks: Ranks,
) -> Tensor:
    """Outputs of `model` for all tokens, part by part, without gradient: (M, …) in the order of the batch."""
    return torch.cat([output_of(model, part) for part in in_step(batch, sequences, max_tokens, ranks)])
