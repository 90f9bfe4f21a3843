"""Score centering: subtracts the expected score under the sampler from the score of every token.

Source: Marek and Ryabinin 2026, arXiv 2609.20807; from torchtitan's code. After any prefix, with the sampler
μ, advantage A and weight w(ρ):

    E_μ[A · w · ∇ log π] = E_μ[A] · E_μ[w · ∇ log π] + Cov_μ(A, w · ∇ log π)

The first term moves π towards w·μ, normalised (away from it, if the mean advantage is negative), whatever the
token does to the reward; it is zero if w·μ is proportional to π. Subtracting A · E_μ[w · ∇ log π] leaves the
covariance. The expectation over the vocabulary is computed from the sampler's most likely tokens H; for the
others, μ is assumed to be proportional to π. As Σ_v π(v) ∇ log π(v) = 0, their part is also a sum over H:

    E_μ[w · ∇ log π] = Σ_{v∈H} sg(μ(v)·w(ρ_v) − α·w(1/α)·π(v)) · ∇ log π(v),
    α = (1 − Σ_H μ) / (1 − Σ_H π)
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.algos.correction import bound
from rlctl.algos.losses import clamped_exp
from rlctl.algos.rules import WeightRule

#: Lower bound of the probability outside H: 1 − Σ_H can be 0, or negative by rounding.
_MIN_TAIL = 1e-6


def expected_score(log_probs: Tensor, rollout_log_probs: Tensor, rule: WeightRule) -> Tensor:
    """Σ_{v∈H} sg(c_v) · log π(v) of each token: its gradient is E_μ[w · ∇ log π], its value has no meaning.

    Args:
        log_probs: (m, K) log π of the listed tokens H, nats, with gradient.
        rollout_log_probs: (m, K) log μ of the same tokens, a constant; −∞: not listed. Without any listed
            token the result is 0.
        rule: the weight w(ρ) of a token, before normalisation; without a level w = 1.

    Returns:
        (m,) float32.
    """
    factors = score_factors(log_probs, rollout_log_probs, rule)
    return (factors * torch.where(rollout_log_probs.isfinite(), log_probs, 0.0)).sum(-1)


@torch.no_grad()
def score_factors(log_probs: Tensor, rollout_log_probs: Tensor, rule: WeightRule) -> Tensor:
    """(m, K): c_v = μ(v)·w(ρ_v) − α·w(1/α)·π(v) of the listed tokens; arguments as of `expected_score`."""
    is_listed = rollout_log_probs.isfinite()
    trained = torch.where(is_listed, log_probs, -torch.inf).exp()
    sampled = rollout_log_probs.exp()
    tails = [(1.0 - share.sum(-1)).clamp(min=_MIN_TAIL) for share in (trained, sampled)]
    log_tails = (tails[0] / tails[1]).log()
    weights = _weight(torch.where(is_listed, log_probs - rollout_log_probs, 0.0), rule)
    in_tail = _weight(log_tails, rule) / log_tails.exp()
    return sampled * weights - in_tail[:, None] * trained


def _weight(log_ratio: Tensor, rule: WeightRule) -> Tensor:
    ratio = clamped_exp(log_ratio)
    return torch.ones_like(ratio) if rule.level is None else bound(ratio, rule)
