"""Divides the episodes of a step: among ranks, into mini-batches, and these into micro-batches (passes).

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

from rlctl.algos.segments import Segments, sorted_by
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


def assigned(episodes: Dealt, num_receivers: int) -> Ints:
    """(K,) who trains on each episode: its number, of `num_receivers` ranks or groups of ranks."""
    receivers = np.zeros_like(episodes.mini)
    totals = [0] * num_receivers  # of all mini-batches so far, which decide between equal loads
    order = np.lexsort((episodes.member, episodes.group, episodes.mini))
    for rows in np.split(order, _starts(episodes.mini[order])[1:]) if num_receivers > 1 else ():
        tokens = episodes.token[rows]
        prompts = episodes.prompt[rows]
        starts = _starts(episodes.group[rows])
        costs = tokens - prompts  # the first of a group computes the prompt
        costs[starts] += prompts[starts]
        of_groups, loads = _dealt(np.add.reduceat(costs, starts), totals)
        chosen = np.repeat(of_groups, np.diff(starts, append=len(rows)))
        if max(loads) * num_receivers > LARGEST * sum(loads):
            chosen, loads = _dealt(tokens, totals)
        receivers[rows] = chosen
        totals = [sum(pair) for pair in zip(totals, loads, strict=True)]
    return receivers


def _starts(column: Ints) -> Ints:
    """Places at which a value follows another one, and 0."""
    return np.flatnonzero(np.diff(column, prepend=column[:1] - 1))


def _dealt(costs: Ints, totals: list[int]) -> tuple[Ints, list[int]]:
    """The receiver of each unit (u,), whose costs are in tokens, and the tokens of each receiver."""
    receivers = np.empty_like(costs)
    loads = [0] * len(totals)
    lightest = [(0, total, receiver) for receiver, total in enumerate(totals)]
    heapq.heapify(lightest)
    for unit in np.argsort(-costs, kind="stable").tolist():
        load, total, receiver = lightest[0]
        receivers[unit], loads[receiver] = receiver, load + int(costs[unit])
        heapq.heapreplace(lightest, (loads[receiver], total, receiver))
    return receivers, loads


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
        receivers = assigned(every, ranks.world_size // group_size)
        batch = _moved(batch, ranks, every, receivers, group_size)
    return batch.pick(in_order(batch.group_ids, batch.members))


def in_order(group_ids: Tensor, members: Tensor) -> Tensor:
    """(E,) int64: the places of the episodes by group, those of a group by member."""
    return sorted_by(group_ids, then=members)


def _described(batch: TokenBatch, rank: int, groups_per_mini: int) -> Tensor:
    """(E, 10) int64: the columns of `Dealt`."""
    sequences = batch.sequences_of_episodes
    groups = batch.group_ids
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


def _moved(batch: TokenBatch, ranks: Ranks, every: Dealt, receivers: Ints, group_size: int) -> TokenBatch:
    """The episodes that arrive at this rank, in the order of their sources.

    Args:
        receivers: (K,) the group of `group_size` ranks that trains on each episode.
    """
    world = ranks.world_size
    num_receivers = ranks.world_size // group_size
    own = np.flatnonzero(every.source == ranks.rank)
    arriving = np.flatnonzero(receivers == ranks.rank // group_size)
    leaving = own[np.argsort(receivers[own], kind="stable")]
    by_receiver = np.split(leaving, np.bincount(receivers[own], minlength=num_receivers).cumsum()[:-1])
    places = [every.place[rows] for rows in by_receiver for _ in range(group_size)]

    def sizes(level: Level) -> tuple[list[int], list[int]]:
        """Entries of a column that leave for each rank, and that arrive from it."""
        entries = every.entries(level)
        to_parts = np.bincount(receivers[own], entries[own], num_receivers).astype(np.int64)
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
            [int(of_rank.sum()) for of_rank in torch.split(column.counts, leaving)],
            [int(of_rank.sum()) for of_rank in torch.split(counts, arriving)],
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
    """Indices (k,) of the episodes of each micro-batch; every episode is in exactly one.

    Args:
        sequences: most sequences of a micro-batch if `max_tokens` is None; an episode is never divided.
        max_tokens: most tokens of a micro-batch; a longer episode is one of its own.
        first: (E,) bool, episodes that the first micro-batches contain, without others. None: any order.
    """
    of_episodes = batch.sequences_of_episodes
    sizes = of_episodes.lengths if max_tokens is None else of_episodes.sum(batch.lengths)
    limit = sequences if max_tokens is None else max_tokens
    flags = [False] * batch.num_episodes if first is None else first.tolist()
    micros: list[list[int]] = []
    for leads in (True, False):
        total = limit + 1
        start = len(micros)
        for episode, size in enumerate(sizes.tolist()):
            if flags[episode] is leads:
                total += size
                if total > limit or len(micros) == start:
                    micros.append([])
                    total = size
                micros[-1].append(episode)
    return [torch.tensor(episodes, device=batch.group_ids.device) for episodes in micros]


def num_passes(num_micro: int, ranks: Ranks) -> int:
    """Passes of every rank, at least one: the most micro-batches of any rank (all ranks call this)."""
    return int(ranks.max(float(max(num_micro, 1))))


def in_step(batch: TokenBatch, sequences: int, max_tokens: int | None, ranks: Ranks) -> list[TokenBatch]:
    """The micro-batches, then empty ones until all ranks have the same number, at least one.

    Under ZeRO a forward or backward pass is a collective.
    """
    micros = [batch.pick(episodes) for episodes in micro_batches(batch, sequences, max_tokens)]
    return micros + [batch.pick([])] * (num_passes(len(micros), ranks) - len(micros))


def inputs_of(micro: TokenBatch) -> ModelInputs:
    """The input of the pass over a micro-batch; over an empty one, an idle pass."""
    return micro.inputs if micro.num_episodes else idle_inputs(micro.token_ids.device)


def output_of(model: Callable[[ModelInputs], Tensor], micro: TokenBatch) -> Tensor:
    """(m, …): the output of a pass for the m sampled tokens of a micro-batch; empty for an idle pass."""
    return model(inputs_of(micro))[: len(micro.turns)]


@torch.no_grad()
def in_passes(
    model: Callable[[ModelInputs], Tensor],
    batch: TokenBatch,
    sequences: int,
    max_tokens: int | None,
    ranks: Ranks,
) -> Tensor:
    """Outputs of `model` for all tokens, pass by pass, without gradient: (M, …) in the order of the batch."""
    return torch.cat([output_of(model, micro) for micro in in_step(batch, sequences, max_tokens, ranks)])
