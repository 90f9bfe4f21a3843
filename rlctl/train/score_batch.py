"""Turns rollouts into a training batch: scores, outputs of all models, KL penalty, advantages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.algos.estimators import AdvantageInputs, Estimate, spread
from rlctl.algos.kl import KLController, kl_estimate
from rlctl.algos.metric_sums import Moments, moments_of
from rlctl.algos.row_blocks import clamped_exp
from rlctl.algos.token_advantages import score_norms, whiten
from rlctl.batch import Rollouts, ScoredBatch, TrainBatch
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure
from rlctl.registry import ADVANTAGE_ESTIMATORS
from rlctl.reward.protocol import RewardResult
from rlctl.spec.algorithm import AlgorithmSpec
from rlctl.spec.base import params_of
from rlctl.train.micro_batches import in_batch_order, micro_batches
from rlctl.train.step_metrics import StepTimer

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


def kl_controller(algorithm: AlgorithmSpec) -> KLController:
    """The controller of the KL coefficient at the start of a run."""
    control = algorithm.kl_ctrl
    target = control.target_kl if control.type == "adaptive" else None
    return KLController(control.kl_coef, target, control.horizon)


@torch.no_grad()
def with_kl_in_reward(
    scored: ScoredBatch, algorithm: AlgorithmSpec, controller: KLController, ranks: Ranks
) -> tuple[ScoredBatch, KLController, dict[str, float]]:
    """Subtracts β · KL(π_old, π_ref) from the reward of every token.

    Source: Ouyang et al. 2022, "InstructGPT". A token with a non-finite log-prob under π_old gets no
    penalty: its sequence is rejected later, and the baseline of its group stays finite.

    Returns:
        The batch with the new rewards, the controller for the next batch, `actor/reward_kl_*` metrics.

    Raises:
        RunFailure: the estimator returns a wrong shape or NaN.
    """
    assert scored.ref_log_probs is not None
    kl = kl_estimate(algorithm.kl_penalty, scored.old_log_probs, scored.ref_log_probs)
    is_finite = (scored.old_log_probs.isfinite() | ~scored.valid_mask).all(-1, keepdim=True)
    kl = torch.where(scored.valid_mask & (is_finite | kl.isfinite()), kl, 0.0)
    lengths = scored.valid_mask.sum(-1)
    mean_kl = moments_of(kl.double().sum(-1) / lengths.clamp(min=1), lengths > 0)
    moments: Moments[float] = ranks.to_host(mean_kl)
    if not math.isfinite(moments.mean):
        raise RunFailure(f"KL estimator {algorithm.kl_penalty} returned NaN or infinity")
    metrics = {
        "actor/reward_kl_penalty": moments.mean,
        "actor/reward_kl_penalty_coeff": controller.kl_coef,
    }
    rewards = scored.token_level_rewards - controller.kl_coef * kl
    updated = controller.updated(moments.mean, int(moments.count))
    return replace(scored, token_level_rewards=rewards), updated, metrics


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


def estimate(scored: ScoredBatch, algorithm: AlgorithmSpec, ranks: Ranks) -> Estimate:
    """Advantages by `algorithm.adv_estimator`; samples whose grader failed get 0.

    Raises:
        RunFailure: the estimator returns a wrong shape, no target values for the critic, or NaN or infinite
            advantages (on all ranks).
    """
    part = ADVANTAGE_ESTIMATORS.part(algorithm.adv_estimator)
    mask = scored.rollouts.response_mask
    found = part.function(
        AdvantageInputs(
            token_level_rewards=scored.token_level_rewards,
            response_mask=mask,
            group_ids=scored.rollouts.group_ids,
            valid=scored.score_valid,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            divide_by_std=algorithm.norm_adv_by_std_in_grpo,
            whiten=partial(whiten, to_host=ranks.to_host),
            total=ranks.sum,
            values=scored.values,
            baseline_scores=scored.baseline_scores,
            score_norms=scored.score_norms,
            sequence_weights=scored.sequence_weights,
            params=params_of(part, algorithm.adv_params),
        )
    )
    result = found if isinstance(found, Estimate) else Estimate(found)
    advantages = result.advantages
    ADVANTAGE_ESTIMATORS.check_returned(part.name, advantages, tuple(mask.shape[:1]), tuple(mask.shape))
    if result.returns is not None:
        ADVANTAGE_ESTIMATORS.check_returned(f"{part.name} (returns)", result.returns, tuple(mask.shape))
    elif "values" in part.needs:
        what = f"advantage estimator {part.name} returned no target values for the critic"
        fix = "return Estimate(advantages, returns)"
        raise RunFailure(what, where=ADVANTAGE_ESTIMATORS.key, fix=fix)
    if advantages.ndim == 1:
        advantages = spread(advantages, mask)
    advantages = torch.where(scored.valid_mask, advantages.float(), 0.0)
    num_bad = int(ranks.sum([float((~advantages.isfinite()).any(1).sum())])[0])
    if num_bad:
        what = f"advantage estimator {part.name} gives NaN or infinite advantages to {num_bad} responses"
        raise RunFailure(what, fix="for example, do not divide by a deviation of 0")
    return Estimate(advantages, result.returns)
