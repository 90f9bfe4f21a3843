"""Graded batches out of random numbers, for what happens between grading and the update."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from rlctl.batch import Rollouts, ScoredBatch
from rlctl.engine.ranks import Ranks
from rlctl.spec.algorithm import AlgorithmSpec
from rlctl.train.score_batch import with_advantages

ROWS, PROMPT, HORIZON = 12, 3, 6
#: Whose sample each row is; siblings are not adjacent.
GROUPS = [0, 1, 0, 1, 0, 1, 2, 2, 2, 3, 3, 3]
#: One empty response, two of a single token.
LENGTHS = [6, 3, 1, 4, 6, 2, 0, 5, 3, 1, 6, 4]
#: Its grader failed.
INVALID = 4


def rollouts_of(seed: int = 0, policy_version: int = 0) -> Rollouts:
    """Responses whose log-probs are of no policy in particular."""
    draw = torch.Generator().manual_seed(seed)
    response_mask = torch.arange(HORIZON) < torch.tensor(LENGTHS)[:, None]
    attention_mask = torch.cat([torch.ones(ROWS, PROMPT, dtype=torch.bool), response_mask], 1)
    ids = torch.randint(2, 20, (ROWS, PROMPT + HORIZON), generator=draw) * attention_mask
    words = tuple(f"word {row}" for row in range(ROWS))
    return Rollouts(
        input_ids=ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0),
        responses=ids[:, PROMPT:],
        response_mask=response_mask,
        rollout_log_probs=-torch.rand(ROWS, HORIZON, generator=draw) * response_mask,
        finish_reason=(torch.tensor(LENGTHS) == HORIZON).to(torch.int8),
        group_ids=torch.tensor(GROUPS),
        policy_version=torch.full((ROWS,), policy_version),
        data_sources=words,
        ground_truths=words,
        prompt_texts=words,
        response_texts=words,
    )


def scored_batch(seed: int = 0) -> ScoredBatch:
    """Every field filled; values outside the mask must not be read."""
    draw = torch.Generator().manual_seed(100 + seed)
    rollouts = rollouts_of(seed)
    mask = rollouts.response_mask
    valid = torch.arange(ROWS) != INVALID

    def noise(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(ROWS, HORIZON, generator=draw)

    scores = torch.where(valid, torch.rand(ROWS, generator=draw), 0.0)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    old = rollouts.rollout_log_probs + torch.where(mask, noise(0.1), 0.0)
    return ScoredBatch(
        rollouts=rollouts,
        scores=scores,
        score_valid=valid,
        token_level_rewards=torch.where(mask, torch.where(last, scores[:, None], noise(0.05)), 0.0),
        old_log_probs=old,
        score_norms=torch.rand(ROWS, HORIZON, generator=draw),
        sequence_weights=(old - rollouts.rollout_log_probs).sum(-1).exp(),
        ref_log_probs=old + torch.where(mask, noise(0.3), 0.0),
        values=noise(),
        baseline_scores=torch.rand(ROWS, generator=draw),
    )


def rows_of(scored: ScoredBatch, rows: list[int]) -> ScoredBatch:
    """Some rows of it."""

    def cut(record):
        names = [f.name for f in fields(record)]
        found = {name: getattr(record, name) for name in names}
        return {name: x[rows] for name, x in found.items() if isinstance(x, torch.Tensor)}

    words = tuple(scored.rollouts.prompt_texts[row] for row in rows)
    texts = dict.fromkeys(("data_sources", "ground_truths", "prompt_texts", "response_texts"), words)
    return replace(scored, rollouts=replace(scored.rollouts, **cut(scored.rollouts), **texts), **cut(scored))


def algorithm_of(estimator: str, **more: object) -> AlgorithmSpec:
    return AlgorithmSpec.model_validate({"adv_estimator": estimator, "gamma": 0.9, "lam": 0.8, **more})


def on_each_rank(ranks: Ranks, estimators: list[str]):
    """Advantages and returns of this rank's prompts, by estimator."""
    mine = [row for row, group in enumerate(GROUPS) if group % ranks.world_size == ranks.rank]
    found = {}
    for estimator in estimators:
        batch = with_advantages(rows_of(scored_batch(), mine), algorithm_of(estimator), ranks)
        found[estimator] = (mine, batch.advantages, batch.returns)
    return found
