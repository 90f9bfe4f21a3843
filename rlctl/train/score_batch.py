"""Turns rollouts into a training batch: scores, outputs of all models, advantages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.algos.row_blocks import clamped_exp
from rlctl.algos.token_advantages import score_norms
from rlctl.batch import Rollouts, ScoredBatch, TrainBatch
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure
from rlctl.reward.protocol import RewardResult
from rlctl.spec.algorithm import AlgorithmSpec
from rlctl.train.compute_advantages import estimate
from rlctl.train.micro_batches import in_batch_order, micro_batches
from rlctl.train.timing import StepTimer

if TYPE_CHECKING:
    from rlctl.batch import ModelInputs, Rows
    from rlctl.train.run import Run


def score_batch(
    run: Run, rollouts: Rollouts, rewards: RewardResult, baseline: RewardResult | None, timer: StepTimer
) -> ScoredBatch:
    """Adds scores and the outputs of policy, reference and critic for the responses.

    π_old is the rollout log-probs in bypass mode, else one more forward pass of the policy.

    Args:
        run: provides the models; those that the spec does not need are None.
        rollouts: this rank's responses.
        rewards: their grades.
        baseline: for each response, the grade of the greedy response to its prompt; None without ReMax.
            A response is excluded if either could not be graded.
        timer: records the seconds of each model.

    Raises:
        RunFailure: the reference's log-probs or the critic's values are not finite.
    """
    device = rollouts.responses.device
    spec = run.spec
    inputs = rollouts.inputs
    parts = micro_batches(inputs, spec.actor.ppo_micro_batch_size_per_gpu, spec.pass_tokens, run.ranks)
    scores, valid = rewards.scores.to(device), rewards.valid.to(device) & ~rollouts.aborted
    baseline_scores = None
    if baseline is not None:
        baseline_scores = baseline.scores.to(device)
        valid = valid & baseline.valid.to(device)

    old_log_probs, norms, weights = _policy(run, rollouts, parts, timer)
    ref_log_probs = None
    if run.ref is not None:
        with timer("ref"):
            ref_log_probs = _gather(run.ref.log_probs, inputs, parts)
        if not ref_log_probs[rollouts.response_mask].isfinite().all():
            raise RunFailure("the reference policy gives NaN or infinite log-probs", where="ref.path")
    values = None
    if run.critic is not None:
        sizes = spec.critic_micro_batch_size, spec.critic_max_token_len
        with timer("values"):
            values = _gather(run.critic.values, inputs, micro_batches(inputs, *sizes, run.ranks))
        if not values[rollouts.response_mask].isfinite().all():
            raise RunFailure(
                "the critic's values are NaN or infinite",
                fix="lower critic.lr, and resume from an earlier checkpoint",
            )
    return ScoredBatch(
        rollouts=rollouts,
        scores=scores,
        score_valid=valid,
        token_level_rewards=_at_last_token(scores, rollouts.response_mask),
        old_log_probs=old_log_probs,
        score_norms=norms,
        sequence_weights=weights,
        ref_log_probs=ref_log_probs,
        values=values,
        baseline_scores=baseline_scores,
    )


def _policy(
    run: Run, rollouts: Rollouts, parts: list[Rows], timer: StepTimer
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """π_old (B, T), and if the estimator needs them, ‖∇ log π‖² (B, T) and Π π/π_rollout (B,), else None."""
    algorithm = run.spec.algorithm
    needs_norms, needs_weights = map(algorithm.estimator_needs, ("score_norms", "sequence_weights"))
    bypass = algorithm.rollout_correction.bypass_mode
    if bypass and not needs_norms and not needs_weights:
        return rollouts.rollout_log_probs, None, None
    with timer("old_log_prob"), torch.no_grad():
        outputs = [run.actor.policy(rollouts.inputs.pick(rows), sum_pi_squared=needs_norms) for rows in parts]
    own = in_batch_order([output.log_probs for output in outputs], parts)
    squares = [output.sum_pi_squared for output in outputs if output.sum_pi_squared is not None]
    norms = score_norms(own, in_batch_order(squares, parts)) if squares else None
    weights = None
    if needs_weights:
        gaps = torch.where(rollouts.response_mask, own - rollouts.rollout_log_probs, 0.0).double().sum(-1)
        weights = clamped_exp(gaps).nan_to_num(nan=0.0)
    return rollouts.rollout_log_probs if bypass else own, norms, weights


def _gather(model: Callable[[ModelInputs], Tensor], inputs: ModelInputs, parts: list[Rows]) -> Tensor:
    """Outputs of `model` (B, T), one micro-batch at a time, without gradient."""
    with torch.no_grad():
        return in_batch_order([model(inputs.pick(rows)) for rows in parts], parts)


def _at_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """(B, T): each response's score (B,) at its last token, 0.0 elsewhere."""
    from_here = response_mask.flip(-1).cumsum(-1).flip(-1)
    return torch.where(response_mask & (from_here == 1), scores[:, None], 0.0)


def with_advantages(
    scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks, policy_version: int = 0
) -> TrainBatch:
    """Adds advantages; the estimator may use statistics of the whole batch (a collective).

    Args:
        policy_version: number of optimizer updates in the trained policy.
    """
    found = estimate(scored, algorithm, ranks)
    rollouts, advantages = scored.rollouts, found.advantages
    if rollouts.prompt_weights is not None:
        advantages = advantages * rollouts.prompt_weights[:, None]
    return TrainBatch(
        input_ids=rollouts.input_ids,
        attention_mask=rollouts.attention_mask,
        position_ids=rollouts.position_ids,
        responses=rollouts.responses,
        response_mask=rollouts.response_mask,
        sample_mask=scored.score_valid,
        rollout_log_probs=rollouts.rollout_log_probs,
        old_log_probs=scored.old_log_probs,
        advantages=advantages,
        ref_log_probs=scored.ref_log_probs,
        values=scored.values,
        returns=found.returns,
        age=policy_version - rollouts.policy_version,
        kept=rollouts.kept,
        most_likely=rollouts.most_likely,
        group_ids=rollouts.group_ids,
    )
