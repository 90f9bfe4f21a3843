"""From rollouts to a batch that can be trained on: scores, old log-probs, advantages."""

from __future__ import annotations

import torch

from rlctl.algos.advantages import grpo, rloo
from rlctl.batch import Rollouts, ScoredBatch, TrainBatch
from rlctl.engine.protocol import TrainEngine
from rlctl.errors import RunFailure
from rlctl.reward.protocol import RewardResult
from rlctl.spec.algorithm import AlgorithmSpec


def rank_positions(
    train_batch_size: int, ppo_mini_batch_size: int, *, rank: int, world_size: int
) -> list[int]:
    """Which prompts of the whole batch this rank takes, in its order.

    Every mini-batch is spread evenly over the ranks, so that mini-batch k consists of the same
    prompts however many ranks there are.
    """
    share = ppo_mini_batch_size // world_size
    return [
        start + rank * share + i
        for start in range(0, train_batch_size, ppo_mini_batch_size)
        for i in range(share)
    ]


def score_batch(
    rollouts: Rollouts, rewards: RewardResult, actor: TrainEngine, algorithm: AlgorithmSpec, micro_rows: int
) -> ScoredBatch:
    """Add scores and π_old: the rollout's own log-probs in bypass mode, else one more pass."""
    device = rollouts.responses.device
    old_log_probs = rollouts.rollout_log_probs
    if not algorithm.rollout_correction.bypass_mode:
        with torch.no_grad():
            parts = _as_train_batch(rollouts).split(micro_rows)
            old_log_probs = torch.cat([actor.policy(part).log_probs for part in parts])
    return ScoredBatch(
        rollouts=rollouts,
        scores=rewards.scores.to(device),
        score_valid=rewards.valid.to(device),
        old_log_probs=old_log_probs,
    )


def with_advantages(scored: ScoredBatch, algorithm: AlgorithmSpec) -> TrainBatch:
    """Compare siblings and spread each response's advantage over its tokens.

    Raises:
        RunFailure: the estimator needs a critic.
    """
    rollouts = scored.rollouts
    groups = (scored.scores, rollouts.group_ids, scored.score_valid)
    if algorithm.adv_estimator == "rloo":
        advantages = rloo(*groups)
    elif algorithm.adv_estimator == "grpo":
        advantages = grpo(*groups, divide_by_std=algorithm.norm_adv_by_std_in_grpo)
    else:
        raise RunFailure(f"adv_estimator {algorithm.adv_estimator} needs a critic, which is not trained yet")
    per_token = torch.where(rollouts.response_mask, advantages[:, None], 0.0)
    return _as_train_batch(
        rollouts, sample_mask=scored.score_valid, old_log_probs=scored.old_log_probs, advantages=per_token
    )


def _as_train_batch(
    rollouts: Rollouts,
    *,
    sample_mask: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
) -> TrainBatch:
    return TrainBatch(
        input_ids=rollouts.input_ids,
        attention_mask=rollouts.attention_mask,
        position_ids=rollouts.position_ids,
        responses=rollouts.responses,
        response_mask=rollouts.response_mask,
        sample_mask=torch.ones_like(rollouts.truncated) if sample_mask is None else sample_mask,
        rollout_log_probs=rollouts.rollout_log_probs,
        old_log_probs=rollouts.rollout_log_probs if old_log_probs is None else old_log_probs,
        advantages=torch.zeros_like(rollouts.rollout_log_probs) if advantages is None else advantages,
    )
