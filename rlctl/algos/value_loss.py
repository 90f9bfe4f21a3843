"""The critic's loss: per-token values (B, T), to be aggregated by `rlctl.algos.aggregate`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.algos.losses import TokenLoss


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float
) -> TokenLoss:
    """Squared error with PPO's value clip: ½ · max((v − R)², (clip(v, v_old ± clip) − R)²).

    A value that has moved by more than `clip` towards its return gets no further gradient. The paper does
    not contain this clip; OpenAI's PPO code (`baselines/ppo2`, Schulman et al. 2017) does.

    Args:
        values: (B, T) the critic's predictions, with gradient.
        old_values: (B, T) its predictions before the first update on this batch; constants.
        returns: (B, T) target values; constants.
        mask: (B, T) bool; the loss is 0.0 where it is False, even if other inputs are NaN there.
        clip: `critic.cliprange_value`, in units of reward.
    """
    new, old, target = (torch.where(mask, x, 0.0) for x in (values, old_values.detach(), returns.detach()))
    unclipped = (new - target).square()
    bounded = (new.clamp(old - clip, old + clip) - target).square()
    return TokenLoss(0.5 * torch.maximum(unclipped, bounded), clipped=bounded > unclipped)
