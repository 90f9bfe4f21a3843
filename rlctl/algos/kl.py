"""KL divergence to the reference policy: estimators for reward and loss, and the coefficient's controller.

Every value is a one-sample estimate per token of KL(π_θ ‖ π_ref) given the preceding tokens, in nats;
all are columns of m tokens. In the reward, where the value is a constant, the policy gradient of k1 alone is
that of the KL. Every estimator is `estimator(log_probs, ref_log_probs, rollout_log_probs, unit) -> Tensor`,
registered by its name (`rlctl.registry`); one that reads π_rollout, or `unit`, the tokens of each response,
can be used as a loss only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlctl.algos.losses import clamped_exp, widened
from rlctl.algos.rules import LOG_RATIO_CLAMP
from rlctl.registry import KL_ESTIMATORS

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.segments import Segments


#: Log-probs below this are of probability 0.
_IMPOSSIBLE = -1e30
_SCHULMAN = 'Schulman 2020, "Approximating KL Divergence"'


@KL_ESTIMATORS.register(label="log-ratio", formula="log π − log π_ref", source=_SCHULMAN)
def k1(log_probs: Tensor, ref_log_probs: Tensor, rollout_log_probs: Any, unit: Any) -> Tensor:
    """Unbiased as a value, of either sign. As a loss it has no effect: its expected gradient is zero."""
    return log_probs - ref_log_probs


@KL_ESTIMATORS.register(label="squared log-ratio", formula="½ (log π − log π_ref)²", source=_SCHULMAN)
def k2(log_probs: Tensor, ref_log_probs: Tensor, rollout_log_probs: Any, unit: Any) -> Tensor:
    """Biased as a value, with low variance while the policies are close. As a loss, for tokens sampled from
    π_θ, its expected gradient is ∇ KL(π_θ ‖ π_ref), the reverse KL."""
    return 0.5 * (log_probs - ref_log_probs).square()


@KL_ESTIMATORS.register(label="never negative", formula="π_ref/π − 1 − log(π_ref/π)", source=_SCHULMAN)
def k3(log_probs: Tensor, ref_log_probs: Tensor, rollout_log_probs: Any, unit: Any) -> Tensor:
    """Unbiased as a value and never negative; its log-ratio is clamped to ±20. As a loss, for tokens sampled
    from π_θ, its expected gradient is ∇ KL(π_ref ‖ π_θ), the forward KL."""
    return never_negative(log_probs, ref_log_probs)


def never_negative(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """k3 of each token (m,): π_ref/π − 1 − log(π_ref/π)."""
    gap = (log_probs - ref_log_probs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return (-gap).expm1() + gap  # without the cancellation of exp(−gap) − 1


@KL_ESTIMATORS.register(
    label="k3 weighted per token",
    formula="(π_θ/π_rollout) · k3",
    source='DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1',
    needs={"rollout_log_probs"},
)
def unbiased(log_probs: Tensor, ref_log_probs: Tensor, rollout_log_probs: Tensor, unit: Segments) -> Tensor:
    """The gradient also flows through the ratio; its expectation is ∇ KL(π_θ ‖ π_ref) of each token's
    distribution, for any policy π_rollout that sampled the token. It is not the KL gradient of whole
    sequences, because the preceding tokens follow π_rollout and carry no gradient. The log-ratio is clamped
    to ±20."""
    return clamped_exp(log_probs - rollout_log_probs) * never_negative(log_probs, ref_log_probs)


@KL_ESTIMATORS.register(
    label="k3 weighted per sequence",
    formula="(Π_{s≤t} π_θ(s)/π_rollout(s)) · k3_t",
    source='Precup, Sutton and Singh 2000, "Eligibility Traces for Off-Policy Policy Evaluation"',
    needs={"rollout_log_probs"},
)
def sequence(log_probs: Tensor, ref_log_probs: Tensor, rollout_log_probs: Tensor, unit: Segments) -> Tensor:
    """The gradient also flows through the product; its expectation, summed over a sequence, is
    ∇ KL(π_θ ‖ π_ref) of whole sequences, for any policy π_rollout that sampled them, if none is rejected.
    Its variance grows with the length, as with sequence weights. Needs complete responses. The log of the
    product is clamped to ±20."""
    log_product = unit.cumsum(log_probs - rollout_log_probs).to(log_probs.dtype)
    return clamped_exp(log_product) * never_negative(log_probs, ref_log_probs)


def kl_estimate(kind: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Per-token estimate (m,) of the KL of tokens sampled from π, for rewards and metrics.

    Args:
        kind: an estimator that needs neither `rollout_log_probs` nor `unit`, which are None.

    Raises:
        RunFailure: the estimator returns no tensor of that shape.
    """
    values: Tensor = KL_ESTIMATORS[kind](log_probs, ref_log_probs, None, None)
    KL_ESTIMATORS.check_returned(kind, values, tuple(log_probs.shape))
    return values


def kl_loss(
    kind: str, log_probs: Tensor, ref_log_probs: Tensor, rollout_log_probs: Tensor, unit: Segments
) -> Tensor:
    """Per-token penalty (m,) with gradient through π_θ, for the m tokens of the loss.

    The gradient of an unbiased KL estimate is not necessarily an unbiased estimate of the KL's gradient; see
    the docstring of each estimator for its expected gradient.

    Args:
        unit: the tokens (m,) of each response.

    Raises:
        RunFailure: the estimator returns no tensor of that shape, or one without gradient.
    """
    widened_inputs = (widened(x) for x in (log_probs, ref_log_probs.detach(), rollout_log_probs.detach()))
    values: Tensor = KL_ESTIMATORS[kind](*widened_inputs, unit)
    KL_ESTIMATORS.check_returned(kind, values, tuple(log_probs.shape))
    KL_ESTIMATORS.check_gradient(kind, values, log_probs, "log_probs")
    return values


def top_k_kl(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """(m,): reverse KL(π_θ ‖ other) of each token's distribution, with gradient, of the listed tokens and a
    bucket for all others.

    Merging tokens into a bucket never increases a KL (log-sum inequality; Cover and Thomas 2006, theorem
    2.7.1): it is a lower bound of the KL over the vocabulary, and equal to it if all tokens are listed. Its
    gradient is that of the bound, given the preceding tokens, whichever policy sampled them.

    Args:
        log_probs, other_log_probs: (m, K + 1) nats, of the same K tokens and of the bucket.
    """
    new = widened(log_probs)
    other = widened(other_log_probs.detach())
    gaps = (new - other).where(other > _IMPOSSIBLE, 0.0)  # an empty bucket; a token that truncation left out
    return (new.exp() * gaps).sum(-1)


@dataclass(frozen=True, slots=True)
class KLController:
    """The coefficient of the KL penalty in the reward: fixed, or adapted to a target KL.

    Attributes:
        kl_coef: the current coefficient.
        target_kl: target, in the unit of the KL passed to `updated`; None: `kl_coef` is fixed.
        horizon: number of sequences over which the coefficient changes by at most 20 %.
    """

    kl_coef: float
    target_kl: float | None
    horizon: int

    def updated(self, kl: float, num_sequences: int) -> KLController:
        """The controller after a batch of `num_sequences` whose mean KL was `kl`.

        Source: Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences":
        coef ← coef · (1 + clip(kl/target − 1, ±0.2) · n/horizon). Two deviations: n is limited to `horizon`
        (more than five horizons at once could make the coefficient negative, which would reward drift), and
        a batch with a NaN KL leaves the coefficient unchanged.
        """
        if self.target_kl is None or math.isnan(kl):
            return self
        error = min(max(kl / self.target_kl - 1.0, -0.2), 0.2)
        share = min(num_sequences / self.horizon, 1.0)
        return replace(self, kl_coef=self.kl_coef * (1.0 + error * share))
