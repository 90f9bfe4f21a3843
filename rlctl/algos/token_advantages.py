"""Advantages per token, and statistics of a whole column: whitening, explained variance.

Columns are (M,), one entry per sampled token; results are float32. What was not sampled, such as the output
of a tool, is in no column: the tokens before and after it are neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.algos.segments import Segments


def gae(
    rewards: Tensor, values: Tensor, unit: Segments, gamma: Tensor | float, lam: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} − V_t.

    After a response's last token both V and A are 0.

    Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE".

    Args:
        rewards: (M,) after KL penalty and shaping.
        values: (M,) V(s_t), the critic's prediction before token t.
        unit: the tokens of each response.
        gamma: discount of what follows a token, seen from that token. A column (M,) has at token t + 1 the
            discount between t and t + 1.
        lam: λ; 1 uses all later rewards and no later value, 0 uses the next value only. A column as `gamma`.

    Returns:
        advantages (M,), not whitened; and returns (M,) A_t + V_t, the critic's target values.
    """
    rewards, values = rewards.double(), values.double()
    discounts, traces = (torch.zeros_like(values) + rate for rate in (gamma, lam))
    # a column of rows is (K,), and what follows the last one is 0
    columns = [unit.padded(x).unbind(1) for x in (rewards, values, discounts, discounts * traces)]
    advantages: list[Tensor] = []
    later_value = later_advantage = later_discount = later_trace = rewards.new_zeros(len(unit))
    for reward, value, discount, trace in reversed(list(zip(*columns, strict=True))):
        delta = reward + later_discount * later_value - value
        later_advantage = delta + later_trace * later_advantage
        later_value, later_discount, later_trace = value, discount, trace
        advantages.append(later_advantage)
    found = unit.flat(torch.stack(advantages[::-1], 1)) if advantages else torch.zeros_like(values)
    return found.float(), (found + values).float()


def reward_to_go(rewards: Tensor, unit: Segments, gamma: Tensor | float) -> Tensor:
    """(M,) discounted sum of this and all later rewards, G_t = r_t + γ·G_{t+1}; arguments as of `gae`.

    Source: Hu et al. 2025, "REINFORCE++" (whitened over the batch, it is that estimator's advantage).
    """
    return gae(rewards, torch.zeros_like(rewards), unit, gamma, 1.0)[0]


def score_norms(log_probs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """‖∇ log π‖² of each sampled token with respect to the logits, (M,): 1 − 2π + Σ_v π(v)².

    Args:
        log_probs: log-probs of the sampled tokens.
        sum_pi_squared: Σ_v π(v)² over the vocabulary, at each token.
    """
    return 1.0 - 2.0 * log_probs.exp() + sum_pi_squared


def without_rounding(differences: Tensor, values: Tensor) -> Tensor:
    """Sets float64 differences of float32 values and their mean to 0.0 if they are rounding error.

    The mean of equal values differs from them by about 1e-16 of their size, which must not become a signal.
    """
    return torch.where(differences.abs() > 1e-9 * values.abs(), differences, 0.0)


def whiten(values: Tensor) -> Tensor:
    """(x − mean) / √(std² + 1e-8) of the whole column, float32; std with n − 1."""
    values = values.double()
    centred = without_rounding(values - values.mean(), values)
    variance = centred.square().sum() / max(len(values) - 1, 1)
    return (centred / (variance + 1e-8).sqrt()).float()


def explained_variance(returns: Tensor, values: Tensor) -> float:
    """1 − Var(returns − values)/Var(returns): 1 for a perfect critic, 0 for a constant prediction.

    0.0 if the returns do not vary. Both arguments are the whole column, over all ranks.
    """
    returns, residuals = returns.double(), returns.double() - values.double()
    spread = (returns - returns.mean()).square().sum()
    unexplained = (residuals - residuals.mean()).square().sum()
    varies = bool(spread > 1e-12 * returns.square().sum())  # by more than rounding
    return 1.0 - float(unexplained / spread) if varies else 0.0
