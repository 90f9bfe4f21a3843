"""Advantage estimators that return one advantage per response.

Every estimator takes `scores` (B,) and `valid` (B,) bool (False: the grader failed; the sample is excluded
and gets 0) and returns (B,) float32. Group estimators compare the responses to one prompt: they also take
`group_ids` (B,), and a response without a valid sibling gets 0.

`dr_grpo`, and `reinforce_plus_plus_baseline` before whitening, are `grpo(divide_by_std=False)`.
Estimators per token are in `rlctl.algos.token_advantages`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlctl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def _group_sums(values: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """For each response: sum of `values` and number of responses over the valid responses of its group."""
    _, index = torch.unique(group_ids, return_inverse=True)
    valid_values = torch.where(valid, values, 0.0)
    size = int(index.max()) + 1 if len(index) else 0
    sums = torch.zeros(size, dtype=values.dtype, device=values.device).index_add_(0, index, valid_values)
    counts = torch.zeros_like(sums).index_add_(0, index, valid.to(values.dtype))
    return sums[index], counts[index]


def rloo(scores: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """REINFORCE leave-one-out: A_i = r_i − mean reward of the group's other responses.

    Source: Ahmadian et al. 2024, "Back to Basics".
    """
    rewards = scores.double()
    sums, counts = _group_sums(rewards, group_ids, valid)
    advantage = (counts * rewards - sums) / (counts - 1).clamp(min=1)
    return torch.where(valid & (counts > 1), advantage, 0.0).float()


def grpo(scores: Tensor, group_ids: Tensor, valid: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """Group-relative advantage: A_i = (r_i − mean) / (std + 1e-6), std with n − 1.

    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2. Without `divide_by_std` it is the
    centred reward r_i − mean (Liu et al. 2025, "Understanding R1-Zero-Like Training": Dr. GRPO; Hu et
    al. 2025, "REINFORCE++": its baseline variant). A group of equal rewards gets exactly 0.
    """
    rewards = scores.double()
    sums, counts = _group_sums(rewards, group_ids, valid)
    centred = rewards - sums / counts.clamp(min=1)
    squares, _ = _group_sums(centred.square(), group_ids, valid)
    std = (squares / (counts - 1).clamp(min=1)).sqrt()
    if divide_by_std:
        centred = centred / (std + 1e-6)
    # In a group of equal rewards, rounding in the mean leaves ±1e-17, which must not become a signal.
    return torch.where(valid & (counts > 1) & (std > 1e-9), centred, 0.0).float()


def maxrl(scores: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """MaxRL: A_i = (r_i − mean) / mean over the group, for rewards ≥ 0; 0 where the mean is not positive.

    Source: "Maximum Likelihood Reinforcement Learning", arXiv 2602.02710.
    """
    rewards = scores.double()
    sums, counts = _group_sums(rewards, group_ids, valid)
    mean = sums / counts.clamp(min=1)
    usable = valid & (counts > 1) & (mean > 0)
    return torch.where(usable, (rewards - mean) / torch.where(usable, mean, 1.0), 0.0).float()


def weighted_baseline(scores: Tensor, weights: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """A_i = r_i − Σ_j c_j r_j / Σ_j c_j over the group; with c_j ∝ E|g_j|² its gradient varies least.

    g_j is the gradient of response j for reward 1. In a group with Σ c = 0, or of equal rewards, A is 0.

    Sources: Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline" (c: the length, if the gradients of
    tokens have equal norms and are uncorrelated); Huang et al. 2026, arXiv 2602.17616 (c = W² |∇ log π|²).

    Args:
        weights: (B,) c ≥ 0.
    """
    rewards, weights = scores.double(), weights.double()
    weighted, _ = _group_sums(rewards * weights, group_ids, valid)
    total, _ = _group_sums(weights, group_ids, valid)
    advantage = rewards - weighted / total.where(total > 0, 1.0)
    return torch.where(valid & (total > 0) & (advantage.abs() > 1e-9), advantage, 0.0).float()


def remax(scores: Tensor, baseline_scores: Tensor, valid: Tensor) -> Tensor:
    """ReMax: A_i = r_i − the score of the greedy response to the same prompt.

    Source: Li et al. 2023, "ReMax".

    Args:
        baseline_scores: (B,) the greedy response's score, repeated for each response.
        valid: (B,) bool, both responses were graded.
    """
    return torch.where(valid, scores.double() - baseline_scores.double(), 0.0).float()


def has_spread(scores: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """(B,) bool: the valid rewards of the row's group differ, so that the group gives a learning signal."""
    rewards = scores.double()
    sums, counts = _group_sums(rewards, group_ids, valid)
    squares, _ = _group_sums((rewards - sums / counts.clamp(min=1)).square(), group_ids, valid)
    return squares > 1e-12


def spread_probability(rate: float, n: int) -> float:
    """Probability that the rewards of n responses differ, if each is 1 with probability `rate`, else 0."""
    return 1.0 - rate**n - (1.0 - rate) ** n


def zero_spread_fraction(scores: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Number of groups whose valid rewards are equal (no signal), and number of groups; two () float64."""
    _, all_counts = _group_sums(torch.ones_like(scores.double()), group_ids, torch.ones_like(valid))
    share = 1.0 / all_counts  # the shares of a group's members add up to 1
    return torch.where(has_spread(scores, group_ids, valid), 0.0, share).sum(), share.sum()
