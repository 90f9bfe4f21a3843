"""A policy loss in one file: PPO's surrogate with a soft penalty instead of a clip.

    rlctl train --preset rloo-seq-is \
        algorithm.rollout_correction.loss_type=examples/custom_loss.py:soft_ppo \
        algorithm.rollout_correction.loss_params.beta=4
"""

from __future__ import annotations

from pydantic import BaseModel, Field

from rlctl.parts import POLICY_LOSSES, LossInputs, LossRule, TokenLoss


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
def soft_ppo(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """(m,) loss per token, with gradient through `inputs.log_probs`."""
    ratio = inputs.ratio
    penalty = 0.5 * rule.params.beta * (ratio - 1.0).square()
    return TokenLoss(-(ratio * inputs.advantages - penalty))
