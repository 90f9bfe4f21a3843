"""A batch of graded episodes out of random numbers, for what happens between scoring and the update."""

from __future__ import annotations

import torch

from rlctl.algos.segments import Segments
from rlctl.batch import TokenBatch
from rlctl.engine.ranks import Ranks
from rlctl.run_spec.algorithm import AlgorithmSpec
from rlctl.train.score_batch import with_advantages
from rlctl.train.settings import EstimatorSettings

PROMPT = 3
#: Group of each episode; siblings are not adjacent, and one group has a member less.
GROUPS = [0, 1, 0, 1, 1, 2, 2, 2, 3, 3, 3]
MEMBERS = [0, 0, 1, 1, 2, 0, 1, 2, 0, 1, 2]
#: One empty response, two of a single token.
LENGTHS = [6, 3, 1, 4, 2, 0, 5, 3, 1, 6, 4]
ROWS, TOKENS = len(GROUPS), sum(LENGTHS)


def scored_batch(seed: int = 0) -> TokenBatch:
    """Episodes of one sequence, with every column that estimators and the KL penalty read."""
    draw = torch.Generator().manual_seed(seed)
    lengths, places = torch.tensor(LENGTHS), torch.arange(ROWS)
    unit, sequences = Segments(lengths), Segments(lengths + PROMPT)

    def noise(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(TOKENS, generator=draw)

    rollout = -torch.rand(TOKENS, generator=draw)
    old = rollout + noise(0.1)
    scores = torch.rand(ROWS, generator=draw)
    is_last = unit.places == unit.spread(lengths) - 1
    return TokenBatch(
        token_ids=torch.randint(2, 20, (sequences.total,), generator=draw),
        sampled=sequences.places >= PROMPT,
        lengths=sequences.lengths,
        owners=places,
        group_ids=torch.tensor(GROUPS),
        members=torch.tensor(MEMBERS),
        prompt_weights=torch.ones(ROWS),
        rollout_log_probs=rollout,
        versions=torch.zeros(TOKENS, dtype=torch.int64),
        turns=torch.zeros(TOKENS, dtype=torch.int64),
        rewards=torch.where(is_last, unit.spread(scores), noise(0.05)),
        old_log_probs=old,
    ).with_columns(
        score_norms=torch.rand(TOKENS, generator=draw),
        sequence_weights=unit.sum(old - rollout).exp().float(),
        ref_log_probs=old + noise(0.3),
        values=noise(),
        baseline_scores=torch.rand(ROWS, generator=draw),
    )


def algorithm_of(estimator: str, **more: object) -> AlgorithmSpec:
    return AlgorithmSpec.model_validate({"adv_estimator": estimator, "gamma": 0.9, "lam": 0.8, **more})


def on_each_rank(ranks: Ranks, estimators: list[str]):
    """Advantages and returns of this rank's episodes, by estimator; siblings are on different ranks."""
    batch = scored_batch()
    mine = list(range(ranks.rank, ROWS, ranks.world_size))
    tokens = batch.units.episode.entries_of(torch.tensor(mine))
    found = {}
    for estimator in estimators:
        own = with_advantages(batch.pick(mine), EstimatorSettings.of(algorithm_of(estimator)), ranks)
        found[estimator] = (tokens, own.advantages, own.columns.get("returns"))
    return found
