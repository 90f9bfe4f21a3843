"""Divides the episodes of a step: among ranks, into mini-batches, and each into forward passes (parts).

Every rank gets about the same number of tokens. Within each mini-batch whole groups are dealt, because
siblings share the computation of their prompt, unless this leaves a rank with over `LARGEST` times the mean;
then episodes. The largest goes first, to the rank with the fewest tokens so far. Every rank computes the same
assignment from the sizes of all episodes.

Parts are consecutive episodes, so that siblings stay together. Episodes without gradient come first, so that
their forward passes need no backward pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlctl.algos.segments import Segments
from rlctl.batch import Level, ModelInputs, TokenBatch, TokenLists
from rlctl.engine.layout import idle_inputs
from rlctl.engine.ranks import Ranks

Ints: TypeAlias = NDArray[np.int64]
#: Largest share of a rank in a mini-batch, relative to the mean, at which groups are kept together.
LARGEST = 1.05


@dataclass(frozen=True, slots=True)
class Dealt:
    """K episodes of all ranks, by rank: what the assignment depends on, and the sizes of their columns.

    All are (K,) int64.
    """

    mini: Ints
    group: Ints
    member: Ints
    source: Ints  # the rank that sampled it
    place: Ints  # index in its source's batch
    prompt: Ints  # tokens that it shares with its siblings
    token: Ints  # number of tokens
    sampled: Ints  # of them, the sampled ones
    sequence: Ints  # number of sequences
    episode: Ints  # 1

    def entries(self, level: Level) -> Ints:
        """(K,) number of entries in a column of this level."""
        sizes: Ints = getattr(self, level)
        return sizes


def assigned(episodes: Dealt, num_parts: int) -> Ints:
    """(K,) the part, of `num_parts`, of every episode."""
    parts = np.zeros_like(episodes.mini)
    totals = [0] * num_parts  # of all mini-batches so far, which decide between equal parts
    order = np.lexsort((episodes.member, episodes.group, episodes.mini))
    for rows in np.split(order, _starts(episodes.mini[order])[1:]) if num_parts > 1 else ():
        tokens, prompts = episodes.token[rows], episodes.prompt[rows]
        starts = _starts(episodes.group[rows])
        costs = tokens - prompts  # the first of a group computes the prompt
        costs[starts] += prompts[starts]
        of_groups, loads = _dealt(np.add.reduceat(costs, starts), totals)
        chosen = np.repeat(of_groups, np.diff(starts, append=len(rows)))
        if max(loads) * num_parts > LARGEST * sum(loads):
            chosen, loads = _dealt(tokens, totals)
        parts[rows] = chosen
        totals = [sum(pair) for pair in zip(totals, loads, strict=True)]
    return parts


def _starts(column: Ints) -> Ints:
    """Places at which a value follows another one, and 0."""
    return np.flatnonzero(np.diff(column, prepend=column[:1] - 1))


def _dealt(costs: Ints, totals: list[int]) -> tuple[Ints, list[int]]:
    """The part of each unit (u,), whose costs are in tokens, and the tokens of each part."""
    parts, loads = np.empty_like(costs), [0] * len(totals)
    lightest = [(0, total, part) for part, total in enumerate(totals)]
    heapq.heapify(lightest)
    for unit in np.argsort(-costs, kind="stable").tolist():
        load, total, part = lightest[0]
        parts[unit], loads[part] = part, load + int(costs[unit])
        heapq.heapreplace(lightest, (loads[part], total, part))
    return parts, loads


def deal(batch: TokenBatch, ranks: Ranks, groups_per_mini: int, group_size: int = 1) -> TokenBatch:
    """The episodes that this rank trains on, ordered by group and member (all ranks call this).

    Args:
        batch: the episodes that this rank sampled, on its device.
        groups_per_mini: prompts per mini-batch, over all ranks: group g belongs to mini-batch
            g // groups_per_mini.
        group_size: ranks of a sequence-parallel group, which all get the same episodes.
    """
    if ranks.world_size > 1:
        described = ranks.all_gather(_described(batch, ranks.rank, groups_per_mini))
        every = Dealt(*described.cpu().numpy().T)
        parts = assigned(every, ranks.world_size // group_size)
        batch = _moved(batch, ranks, every, parts, group_size)
    return batch.pick(in_order(batch.group_ids, batch.members))


def in_order(group_ids: Tensor, members: Tensor) -> Tensor:
    """(E,) int64: the places of the episodes by group, those of a group by member."""
    by_member = members.argsort(stable=True)
    return by_member[group_ids[by_member].argsort(stable=True)]


def _described(batch: TokenBatch, rank: int, groups_per_mini: int) -> Tensor:
    """(E, 10) int64: the columns of `Dealt`."""
    sequences, groups = batch.sequences_of_episodes, batch.group_ids
    prompts = torch.zeros_like(groups)
    has_any = sequences.lengths > 0
    prompts[has_any] = (batch.lengths - batch.units.sequence.lengths)[sequences.starts[has_any]]
    columns = {
        "mini": groups // groups_per_mini,
        "group": groups,
        "member": batch.members,
        "source": torch.full_like(groups, rank),
        "place": torch.arange(len(groups), device=groups.device),
        "prompt": prompts,
        "token": sequences.sum(batch.lengths).long(),
        "sampled": batch.units.episode.lengths,
        "sequence": sequences.lengths,
        "episode": torch.ones_like(groups),
    }
    return torch.stack([columns[each.name] for each in fields(Dealt)], 1)


def _moved(batch: TokenBatch, ranks: Ranks, every: Dealt, parts: Ints, group_size: int) -> TokenBatch:
    """The episodes that arrive at this rank, in the order of their sources.

    Args:
        parts: (K,) the group of `group_size` ranks that trains on each episode.
    """
    world, num_parts = ranks.world_size, ranks.world_size // group_size
    own = np.flatnonzero(every.source == ranks.rank)
    arriving = np.flatnonzero(parts == ranks.rank // group_size)
    leaving = own[np.argsort(parts[own], kind="stable")]
    by_part = np.split(leaving, np.bincount(parts[own], minlength=num_parts).cumsum()[:-1])
    places = [every.place[rows] for rows in by_part for _ in range(group_size)]

    def sizes(level: Level) -> tuple[list[int], list[int]]:
        """Entries of a column that leave for each rank, and that arrive from it."""
        entries = every.entries(level)
        to_parts = np.bincount(parts[own], entries[own], num_parts).astype(np.int64)
        from_ranks = np.bincount(every.source[arriving], entries[arriving], world).astype(np.int64)
        return np.repeat(to_parts, group_size).tolist(), from_ranks.tolist()

    def exchanged(values: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        return torch.cat(ranks.all_to_all(list(torch.split(values, leaving)), arriving))

    def moved(column: Tensor | TokenLists, level: Level) -> Tensor | TokenLists:
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

    arrived = batch.pick(torch.from_numpy(np.concatenate(places))).mapped(moved)
    counts = torch.from_numpy(every.sequence[arriving])
    return replace(arrived, owners=Segments(counts).index.to(batch.owners.device))


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
