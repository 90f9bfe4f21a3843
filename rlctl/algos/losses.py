"""Policy losses: per-token values (B, T), to be aggregated by `rlctl.algos.aggregate`.

Weights, advantages and old log-probs never carry gradient. Rejected and padded positions are
replaced before any arithmetic, so that NaN there reaches neither value nor gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.algos.rules import LOG_RATIO_CLAMP


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss before aggregation.

    Attributes:
        values: (B, T) per-token loss, 0.0 outside the loss mask.
        clipped: (B, T) bool, where a clip cut the gradient (None: the loss has no clip).
    """

    values: Tensor
    clipped: Tensor | None = None


def reinforce(log_probs: Tensor, advantages: Tensor, loss_mask: Tensor, weights: Tensor | None) -> TokenLoss:
    """REINFORCE with importance weights: −w · A · log π_θ.

    Source: Williams 1992; with w = π_θ/π_rollout the gradient is that of the expected reward under
    π_θ (the reference guide's bypass mode). Shapes (B, T); `weights` None means 1.
    """
    log_probs = torch.where(loss_mask, log_probs, 0.0)
    values = -advantages * log_probs
    return TokenLoss(_weighted(values, weights, loss_mask))


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor | None,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """PPO's clipped surrogate: −w · min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A), r = π_θ/π_old.

    Source: Schulman et al. 2017, eq. 7. The log-ratio is clamped to ±20 before `exp`.
    """
    log_ratio = torch.where(loss_mask, log_probs - old_log_probs, 0.0)
    ppo_ratio = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    free = -advantages * ppo_ratio
    held = -advantages * ppo_ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    values = torch.maximum(free, held)
    return TokenLoss(_weighted(values, weights, loss_mask), clipped=loss_mask & (held > free))


def _weighted(values: Tensor, weights: Tensor | None, loss_mask: Tensor) -> Tensor:
    """Apply detached weights; zero outside the mask even where a weight is not finite."""
    if weights is not None:
        values = values * torch.where(loss_mask, weights.detach(), 0.0)
    return torch.where(loss_mask, values, 0.0)
