"""The KL penalty in the reward, r_t ← r_t − β · KL_t, and the control of β."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlctl.algos.kl import KLController, kl_estimate
from rlctl.algos.metric_sums import Moments, moments_of
from rlctl.batch import ScoredBatch
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure
from rlctl.spec.algorithm import AlgorithmSpec


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

    Source: Ouyang et al. 2022, "InstructGPT", eq. 2. A token with a non-finite log-prob under π_old gets no
    penalty: its sequence is rejected later, and the baseline of its group stays finite.

    Returns:
        The batch with the new rewards, the controller for the next batch, `actor/reward_kl_*` metrics.

    Raises:
        RunFailure: the batch has no reference log-probs.
    """
    if scored.ref_log_probs is None:
        raise RunFailure("the KL penalty needs reference log-probs, and the batch has none")
    kl = kl_estimate(algorithm.kl_penalty, scored.old_log_probs, scored.ref_log_probs)
    kl = torch.where(scored.valid_mask & kl.isfinite(), kl, 0.0)
    lengths = scored.valid_mask.sum(-1)
    mean_kl = moments_of(kl.double().sum(-1) / lengths.clamp(min=1), lengths > 0)
    moments: Moments[float] = ranks.to_host(mean_kl)
    metrics = {
        "actor/reward_kl_penalty": moments.mean,
        "actor/reward_kl_penalty_coeff": controller.kl_coef,
    }
    rewards = scored.token_level_rewards - controller.kl_coef * kl
    updated = controller.updated(moments.mean, int(moments.count))
    return replace(scored, token_level_rewards=rewards), updated, metrics
