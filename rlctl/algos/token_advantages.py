"""Advantages per token, and operations over the whole batch: whitening, explained variance.

All tensors are (B, T); results are float32 and 0.0 outside the mask, whatever the inputs contain there.
A mask may have gaps: tool output is skipped, as if the tokens before and after it were adjacent.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlctl.algos.estimators import without_rounding
from rlctl.algos.metric_sums import Moments, moments_of

#: Merges the moments of all ranks, so that a result is that of the whole batch; `Moments.to_host`: one rank.
ToHost = Callable[[Moments[Tensor]], Moments[float]]


@torch.no_grad()
def gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} − V_t.

    After a response's last token both V and A are 0.

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE".

    Args:
        token_level_rewards: after KL penalty and shaping; values outside the mask are ignored.
        values: V(s_t), the critic's prediction before token t.
        gamma: discount per response token.
        lam: λ; 1 uses all later rewards and no later value, 0 uses the next value only.

    Returns:
        advantages, not whitened; and returns A_t + V_t, the critic's target values.
    """
    rewards, masked_values = (
        torch.where(response_mask, x.double(), 0.0) for x in (token_level_rewards, values)
    )
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        here = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - masked_values[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, masked_values[:, t], next_value)
        advantages[:, t] = torch.where(here, next_advantage, 0.0)
    return advantages.float(), (advantages + masked_values).float()


def reward_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of this and all later rewards, G_t = r_t + γ·G_{t+1}.

    Source: Hu et al. 2025, "REINFORCE++" (whitened over the batch, it is that estimator's advantage).
    """
    nothing = torch.zeros_like(token_level_rewards)
    return gae(token_level_rewards, nothing, response_mask, gamma, lam=1.0)[0]


def score_norms(log_probs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """‖∇ log π‖² of each sampled token with respect to the logits, (B, T): 1 − 2π + Σ_v π(v)².

    Args:
        log_probs: log-probs of the sampled tokens.
        sum_pi_squared: Σ_v π(v)² over the vocabulary, at each token.
    """
    return 1.0 - 2.0 * log_probs.exp() + sum_pi_squared


@torch.no_grad()
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    valid: Tensor,
    norms: Tensor,
) -> Tensor:
    """A_t = G_t − B_t, with one baseline per prompt and timestep: B_t = Σ G_t·W_t / Σ W_t over its group.

    W_t = Σ_{j≤t} (1 − 2π_j + Σ_v π_j(v)²) is the squared norm of the gradient of log π with respect to
    the logits, summed over the response so far: a baseline close to a response's return reduces the variance
    most where its gradient is large. A response contributes at t if it is valid and t is one of its tokens.
    Where only one does, the baseline is 0, as in the authors' code: the tail of the longest response
    keeps its plain return. A response without a valid sibling gets 0, as in every group estimator.

    Source: Li et al. 2026, "The Optimal Token Baseline" (logit-gradient proxy).

    Args:
        group_ids, valid: (B,), as in `rlctl.algos.estimators`.
        norms: `score_norms` of the policy that is about to be updated.
    """
    present = response_mask & valid[:, None]
    returns = reward_to_go(token_level_rewards, present, 1.0).double()
    energy = torch.where(present, norms.double().clamp(min=0.0), 0.0).cumsum(-1)  # ≥ 0 except for rounding

    _, index = torch.unique(group_ids, return_inverse=True)
    energy = torch.where(present, energy, 0.0)
    weighted, total, alive = (
        torch.zeros_like(returns).index_add_(0, index, x)[index]
        for x in (energy * returns, energy, present.double())
    )
    members = torch.zeros_like(returns[:, 0]).index_add_(0, index, valid.double())[index]
    compared = (alive > 1) & (total > 0)
    baseline = torch.where(compared, weighted / total.where(compared, 1.0), 0.0)
    advantages = without_rounding(returns - baseline, returns)
    return torch.where(present & (members > 1)[:, None], advantages, 0.0).float()


# --- over the whole batch -------------------------------------------------------------------------


def whiten(values: Tensor, mask: Tensor, to_host: ToHost = Moments.to_host) -> Tensor:
    """(x − mean) / √(std² + 1e-8), float32, 0.0 outside the mask; std with n − 1."""
    moments = to_host(moments_of(values, mask))
    std = moments.sample_std
    whitened = (values.double() - moments.mean) / math.sqrt(std * std + 1e-8)
    return torch.where(mask, whitened, 0.0).float()


@torch.no_grad()
def explained_variance(returns: Tensor, values: Tensor, mask: Tensor, to_host: ToHost) -> float:
    """1 − Var(returns − values)/Var(returns): 1 for a perfect critic, 0 for a constant prediction.

    0.0 if the returns do not vary.
    """
    target = to_host(moments_of(returns, mask))
    residuals = to_host(moments_of(returns.double() - values.double(), mask))
    if target.std**2 <= 1e-12 * target.mean_square:  # rounding error only
        return 0.0
    return 1.0 - (residuals.std / target.std) ** 2
