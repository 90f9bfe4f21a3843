"""The KL divergence to the reference policy: in the reward, in the loss, and its coefficient.

Every figure is a one-sample estimate per token of KL(π_θ ‖ π_ref) given the tokens before it, in nats;
shapes are (B, T). Sources: Schulman 2020, "Approximating KL Divergence" (k1, k2, k3);
DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1 (`unbiased`); Precup, Sutton and Singh 2000, "Eligibility
Traces for Off-Policy Policy Evaluation" (per-decision importance sampling, `sequence`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rlctl.algos.rules import LOG_RATIO_CLAMP, KLLossType

KLEstimate = Literal["k1", "k2", "k3"]


def kl_estimate(kind: KLEstimate, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Per-token estimate of the KL of tokens sampled from π, for rewards and metrics.

    `k1` log π − log π_ref: unbiased, of either sign. `k2` ½ k1²: biased, but of low variance while the
    policies are close. `k3` π_ref/π − 1 − log(π_ref/π): unbiased and never negative; its log-ratio is
    clamped to ±20.

    Knows no mask: padding is the caller's.
    """
    gap = log_probs - ref_log_probs
    if kind == "k1":
        return gap
    if kind == "k2":
        return 0.5 * gap.square()
    gap = gap.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return (-gap).exp() - 1.0 + gap


def kl_loss(
    kind: KLLossType, log_probs: Tensor, ref_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor
) -> Tensor:
    """Per-token penalty (B, T) with gradient through π_θ; 0.0 outside the mask, whatever is there.

    That a value estimates the KL does not make its gradient estimate the KL's gradient. For tokens
    sampled from π_θ itself, the gradients' expectations are:

    - `k1`: zero. It penalises nothing.
    - `k2`: ∇ KL(π_θ ‖ π_ref), the reverse KL.
    - `k3`: ∇ KL(π_ref ‖ π_θ), the forward KL.
    - `unbiased`, (π_θ/π_rollout) · k3 with gradient through the ratio as well: ∇ KL(π_θ ‖ π_ref) of each
      token's distribution, whichever policy π_rollout the token was sampled from. The tokens before it stay
      π_rollout's and carry no gradient: of whole sequences it is not the KL's gradient.
    - `sequence`, (Π_{s≤t} π_θ(s)/π_rollout(s)) · k3_t with gradient through the product: summed over a
      sequence, ∇ KL(π_θ ‖ π_ref) of whole sequences, whichever policy π_rollout they were sampled from, if
      none is rejected. Its variance grows with the length, as that of sequence weights. Needs whole rows.

    The log of a ratio or product is clamped to ±20.
    """
    given = (log_probs, ref_log_probs.detach(), rollout_log_probs.detach())
    theta, ref, rollout = (torch.where(loss_mask, x, 0.0) for x in given)
    if kind == "unbiased":
        log_ratio = theta - rollout
    elif kind == "sequence":
        log_ratio = (theta - rollout).cumsum(-1)
    else:
        return kl_estimate(kind, theta, ref)
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp() * kl_estimate("k3", theta, ref)


@dataclass(frozen=True, slots=True)
class KLController:
    """The coefficient of the KL penalty in the reward: fixed, or steered towards a target.

    Attributes:
        kl_coef: the coefficient in force.
        target_kl: the KL to hold, in the unit of what `updated` is told; None: `kl_coef` is fixed.
        horizon: sequences over which the coefficient moves by at most a fifth.
    """

    kl_coef: float
    target_kl: float | None
    horizon: int

    def updated(self, kl: float, num_sequences: int) -> KLController:
        """The controller after a batch of `num_sequences` whose mean KL was `kl`.

        Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2:
        coef ← coef · (1 + clip(kl/target − 1, ±0.2) · n/horizon). Two deviations: n counts as at most
        `horizon` (five horizons at once could turn the coefficient negative, a reward for drifting), and
        a batch whose KL is NaN changes nothing.
        """
        if self.target_kl is None or math.isnan(kl):
            return self
        error = min(max(kl / self.target_kl - 1.0, -0.2), 0.2)
        share = min(num_sequences / self.horizon, 1.0)
        return replace(self, kl_coef=self.kl_coef * (1.0 + error * share))
