"""A policy loss in one file: PPO's surrogate with a soft penalty instead of a clip.

    rlctl train --preset rloo-seq-is \
        algorithm.rollout_correction.loss_type=examples/custom_loss.py:soft_ppo \
        algorithm.rollout_correction.loss_params.beta=4
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from rlctl.algos.losses import TokenLoss
from rlctl.algos.rules import LossRule
from rlctl.registry import POLICY_LOSSES


class SoftPPO(BaseModel, extra="forbid"):
    """Parameters of the loss: `algorithm.rollout_correction.loss_params.*`."""

    beta: float = Field(default=1.0, gt=0, description="Strength of the penalty on (r − 1)².")


@POLICY_LOSSES.register(
    label="PPO's surrogate with a quadratic penalty",
    formula="−w · (r·A − ½·β·(r − 1)²), r = π_θ/π_old",
    source="an example",
    needs={"old_log_probs"},
    params=SoftPPO,
    unbiased=True,
    experimental=True,
)
def soft_ppo(
    rule: LossRule,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor | None,
) -> TokenLoss:
    """(B, T) loss per token, with gradient through `log_probs`; 0.0 outside `loss_mask`."""
    ratio = torch.where(loss_mask, log_probs - old_log_probs, 0.0).clamp(-20.0, 20.0).exp()
    values = -(ratio * advantages - 0.5 * rule.params.beta * (ratio - 1.0).square())
    if weights is not None:
        values = values * torch.where(loss_mask, weights, 0.0)
    return TokenLoss(torch.where(loss_mask, values, 0.0))
