"""What the tests of dealing run on ranks of their own."""

from __future__ import annotations

import torch

from rlctl.algos.segments import Segments
from rlctl.batch import TokenBatch, TokenLists
from rlctl.engine.deepspeed import DeepSpeedEngine
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.ranks import Ranks
from rlctl.train.deal import deal
from rlctl.train.update import update
from tests.changed import changed
from tests.models import VOCABULARY, tiny_model
from tests.unit.train.updates import CASES, CENTERED, ROWS, Micro, settings_of, sizes_of

GROUPS, MEMBERS, PER_MINI = 16, 4, 8
#: How the sampled episodes lie on ranks before they are dealt: as a run has them, or on the last rank only.
LAYOUTS = ("blocks", "one rank")


def sampled_batch(seed: int = 0) -> TokenBatch:
    """Groups whose lengths depend on the prompt, with every column; some episodes have two sequences."""
    draw = torch.Generator().manual_seed(seed)

    def up_to(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(1, high + 1, shape, generator=draw)

    count = GROUPS * MEMBERS
    owners = torch.arange(count).repeat_interleave((torch.arange(count) % 5 == 2) + 1)
    prompts = up_to(30, GROUPS)[owners // MEMBERS]
    long = up_to(40, GROUPS)[owners // MEMBERS]
    lengths = prompts + long + up_to(8, len(owners))
    sequences = Segments(lengths)
    sampled = sequences.places >= sequences.spread(prompts)
    tokens = int(sampled.sum())
    kept = torch.randint(0, 4, (tokens,), generator=draw).int()
    listed = torch.randint(1, 4, (tokens,), generator=draw).int()

    def noise(size: int = tokens) -> torch.Tensor:
        return torch.randn(size, generator=draw)

    return TokenBatch(
        token_ids=torch.randint(2, VOCABULARY, (sequences.total,), generator=draw),
        sampled=sampled,
        lengths=lengths,
        owners=owners,
        group_ids=torch.arange(count) // MEMBERS,
        members=torch.arange(count) % MEMBERS,
        prompt_weights=noise(count),
        rollout_log_probs=noise(),
        versions=up_to(9, tokens),
        turns=torch.zeros(tokens, dtype=torch.int64),
        rewards=noise(),
        old_log_probs=noise(),
    ).with_columns(
        kept=TokenLists(kept, torch.arange(int(kept.sum())).int()),
        most_likely=TokenLists(listed, torch.arange(int(listed.sum())).int(), noise(int(listed.sum()))),
        experts=up_to(900, sequences.total, 3, 2).to(torch.int16),
        baseline_scores=noise(count),
        age=up_to(9, tokens),
    )


def mine(ranks: Ranks, layout: str, count: int) -> list[int]:
    """Indices of the episodes that a rank has before they are dealt."""
    if layout == "one rank":
        return list(range(count)) if ranks.rank == ranks.world_size - 1 else []
    share = count // ranks.world_size
    return list(range(ranks.rank * share, (ranks.rank + 1) * share))


def dealt(ranks: Ranks, layout: str, group_size: int) -> TokenBatch:
    """This rank's episodes of `sampled_batch`."""
    batch = sampled_batch()
    own = batch.pick(mine(ranks, layout, batch.num_episodes))
    return deal(own, ranks, PER_MINI, group_size)


def with_kept(batch: TokenBatch) -> TokenBatch:
    """Each token was sampled from a set of its own: the vocabulary, or the token and the two after it."""
    tokens, sizes = batch.inputs.tokens, torch.where(torch.arange(len(batch.turns)) % 3 == 0, 0, 3)
    lists = Segments(sizes)
    ids = (lists.spread(tokens) + lists.places) % VOCABULARY
    restricted = batch.with_columns(kept=TokenLists(sizes.int(), ids.int()))
    module = PolicyModule(tiny_model(), 1.0)
    with torch.no_grad():
        own, other = (module(x.inputs).log_probs for x in (restricted, batch))
    policies = {
        name: batch.column(name) + own - other
        for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs")
    }
    return changed(restricted, **policies)


def updated(
    ranks: Ranks, name: str, micro: Micro, mini: int, stage: int, kept: bool, layout: str, deals: bool
) -> dict[str, object]:
    """Weights and metrics after one update."""
    case = (CASES | CENTERED)[name]
    batch = case.batch(tiny_model())
    batch = (with_kept(batch) if kept else batch).pick(mine(ranks, layout, ROWS))
    batch = deal(batch, ranks, mini) if deals else batch
    actor = DeepSpeedEngine(
        tiny_model(),
        ranks,
        zero_stage=stage,
        dtype=torch.float32,
        temperature=1.0,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        grad_clip=1.0,
    )
    settings = settings_of(
        case.correction, epochs=case.epochs, mini_rows=mini, **sizes_of(micro), **case.options
    )
    found = update(batch, actor, ranks, settings, lambda number: 2e-3 * (number + 1), 0)
    weights = {n: t.detach().float().clone() for n, t in actor.weights()}
    figures = {"num_updates": found.num_updates, **found.metrics}
    return {"weights": weights, "metrics": figures, "episodes": batch.group_ids.tolist()}
