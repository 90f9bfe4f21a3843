"""Recent policy losses that are not yet validated on real runs; responses are independent.

Symbols as in `rlctl.algos.losses`: r = π_θ/π_old per token, W = Π r over the response. In bypass mode π_old
is π_rollout, μ in the papers. "From NAME's code" means that the formula was taken from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from rlctl.algos.losses import LossInputs, TokenLoss, larger_of, ratio_loss
from rlctl.algos.rules import LOG_RATIO_CLAMP, LossRule
from rlctl.lazy import torch
from rlctl.registry import Function

if TYPE_CHECKING:
    from torch import Tensor


class LossParams(BaseModel, extra="forbid"):
    """Base of a loss's own parameters, `algorithm.rollout_correction.loss_params.*`."""


def experimental_loss(**arguments: Any) -> Callable[[Function], Function]:
    """As `ratio_loss`, for a loss that is not yet validated on real runs."""
    return ratio_loss(experimental=True, **arguments)


class VespoParams(LossParams):
    """Exponents k and λ for advantages ≥ 0 (`pos`) and < 0 (`neg`)."""

    k_pos: float = Field(2.0, ge=0)
    lambda_pos: float = Field(3.0, ge=0)
    k_neg: float = Field(3.0, ge=0)
    lambda_neg: float = Field(2.0, ge=0)


@experimental_loss(
    formula="−w · sg(W^k · exp(λ·(1 − W))) · A · log π_θ, k and λ by the sign of A",
    source="arXiv 2602.10693; from TRL's code",
    params=VespoParams,
)
def vespo(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """VESPO: REINFORCE with a gamma-shaped sequence weight.

    The weight is 1 at W = 1; it tends to 0 as W^k for W → 0, and exponentially for W → ∞.
    """
    p: VespoParams = rule.params
    log_w = _log_product(inputs)
    advantages = inputs.advantages
    k = torch.full_like(advantages, p.k_neg).masked_fill(advantages >= 0, p.k_pos)
    rate = torch.full_like(advantages, p.lambda_neg).masked_fill(advantages >= 0, p.lambda_pos)
    phi = (k * log_w + rate * (1.0 - log_w.exp())).exp()
    return TokenLoss(-phi * advantages * inputs.log_probs)


@experimental_loss(
    formula="−w · sg(1 if A ≥ 0, else min(W, 1)) · A · log π_θ",
    source="Le Roux et al. 2025, arXiv 2503.14286",
)
def topr(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """TOPR: truncated sequence weights for negative advantages alone.

    Responses with A ≥ 0 have weight 1 for any π_θ; the others' weight falls as they become less likely.

    The paper uses the sign of the reward; this loss uses the sign of the advantage.
    """
    log_w = _log_product(inputs)
    is_bad = inputs.advantages < 0
    tapered = torch.where(is_bad, log_w.clamp(max=0.0).exp(), 1.0)
    return TokenLoss(-tapered * inputs.advantages * inputs.log_probs, is_bad & (log_w > 0))


class DispoParams(LossParams):
    """Half-widths of the ratio's interval [1 − low, 1 + high], for advantages > 0 and ≤ 0."""

    low_pos: float = Field(ge=0, le=1, examples=[0.2])
    high_pos: float = Field(ge=0, examples=[0.28])
    low_neg: float = Field(ge=0, le=1, examples=[0.2])
    high_neg: float = Field(ge=0, examples=[0.2])


@experimental_loss(
    formula="−w · sg(clip(r, 1 − low±, 1 + high±)) · A · log π_θ",
    source="Karaman et al. 2026, arXiv 2602.00983; the source gives no values: all four are required",
    params=DispoParams,
)
def dispo(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """DISPO: CISPO with separate clips for each sign of the advantage.

    Separate bounds for four cases: advantage positive or not, token more or less likely than before.
    """
    p: DispoParams = rule.params
    ratio = inputs.ratio.detach()
    good = ratio.clamp(1.0 - p.low_pos, 1.0 + p.high_pos)
    bad = ratio.clamp(1.0 - p.low_neg, 1.0 + p.high_neg)
    bounded = torch.where(inputs.advantages > 0, good, bad)
    return TokenLoss(-bounded * inputs.advantages * inputs.log_probs, bounded != ratio)


class CtpoParams(LossParams):
    """Bounds of the log cumulative ratio at the first token, and the power of position t they grow with."""

    low: float = Field(0.025, gt=0)
    high: float = Field(0.05, gt=0)
    dual: float = Field(0.05, gt=0)
    """Of negative advantages: the surrogate is at most exp(dual · t^power) · |A|."""
    power: float = 0.5


@experimental_loss(
    formula="−w · min(R_t·A, clip(R_t)·A), R_t = Π_{s≤t} r_s, log R_t in [−low·t^power, high·t^power]",
    source="Zhang et al. 2026, arXiv 2605.07331; from the authors' code",
    params=CtpoParams,
)
def ctpo(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """CTPO: PPO clip of the prefix's ratio, its bounds growing with √t.

    R_t passes gradient to token t only. The dual clip of negative advantages grows with t as well.
    """
    p: CtpoParams = rule.params
    token = inputs.log_ratio
    advantages = inputs.advantages
    own = token - token.detach()
    log_r = inputs.unit.cumsum(token.detach()).to(token.dtype).clamp(-LOG_RATIO_CLAMP, 10.0) + own
    scale = (inputs.unit.places + 1).to(token.dtype) ** p.power
    unclipped = -advantages * log_r.exp()
    bounded = -advantages * torch.minimum(torch.maximum(log_r, -p.low * scale), p.high * scale).exp()
    return larger_of(unclipped, bounded, advantages, bound=-advantages * (p.dual * scale).exp())


class GmpoParams(LossParams):
    """Bounds of log r."""

    low: float = Field(0.4, gt=0)
    high: float = Field(0.4, gt=0)


@experimental_loss(
    formula="−w · A · exp(mean_t c_t), c_t = min (A < 0: max) of log r_t and clip(log r_t, −low, high)",
    source="Zhao et al. 2025, arXiv 2507.20673; from TRL's code",
    params=GmpoParams,
)
def gmpo(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """GMPO: the geometric mean of token ratios that are clipped one by one.

    Equals GMPO's loss under `seq-mean-token-mean`. As in `gspo`, each token carries its own gradient.
    """
    p: GmpoParams = rule.params
    token = inputs.log_ratio
    advantages = inputs.advantages
    inside = token.clamp(-p.low, p.high)
    bounded = torch.where(advantages > 0, torch.minimum(token, inside), torch.maximum(token, inside))
    mean = inputs.unit.spread(inputs.unit.mean(bounded.detach()).to(token.dtype))
    return TokenLoss(-advantages * (mean + bounded - bounded.detach()).exp(), bounded != token)


class DrpoParams(LossParams):
    """Scale ε of the regularisation; larger is weaker."""

    epsilon: float = Field(12.5, gt=0)


@experimental_loss(
    formula="w · (−A·r + |A| · π_old · (r − 1)² / (2ε))",
    source="arXiv 2606.09821; from UniRL's code",
    params=DrpoParams,
)
def drpo(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """DRPO: a quadratic penalty in place of DPPO's mask.

    The gradient changes sign at |π_θ − π_old| = ε: a bound on the probability, not on the ratio.
    """
    ratio = inputs.ratio
    distance = inputs.old_log_probs.exp() * (ratio - 1.0).square() / (2.0 * rule.params.epsilon)
    return TokenLoss(inputs.advantages.abs() * distance - inputs.advantages * ratio)


class DroParams(LossParams):
    """Coefficient of the penalty; the source gives no default."""

    beta: float = Field(gt=0, examples=[0.1])


@experimental_loss(
    formula="−w · (A · log π_θ − ½ β · log² r)",
    source="Richemond et al. 2024; from verl's code",
    params=DroParams,
    vanishes_without_advantage=False,
)
def dro(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """DRO: REINFORCE with a squared log-ratio penalty.

    The advantage is not multiplied by a ratio; off-policy, the penalty pulls π_θ back to π_old instead.
    """
    penalty = 0.5 * rule.params.beta * inputs.log_ratio.square()
    return TokenLoss(penalty - inputs.advantages * inputs.log_probs)


class SamplerPenaltyParams(LossParams):
    """The mask of the policy gradient, and the penalty's coefficient."""

    region: Literal["none", "dppo", "ipo", "kpop"] = "dppo"
    """Tokens without policy gradient: `dppo` those that A would push beyond ±threshold in probability; `ipo`
    all beyond it; `kpop` all whose binary KL exceeds it, in either direction."""
    threshold: float | None = Field(None, gt=0)
    """null: the source's, 0.2 for `dppo`, else 0.1."""
    tau: float = Field(1e-3, ge=0)


@experimental_loss(
    formula="w · (−M · r · A + τ · log² r), M = 0 outside the region",
    source="arXiv 2602.02276; from prime-rl's code: its losses default, ipo and kpop",
    params=SamplerPenaltyParams,
    vanishes_without_advantage=False,
)
def sampler_penalty(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """Sampler penalty (Kimi K2.5), with the trust regions of prime-rl.

    The penalty also applies to masked tokens and pulls them back to π_old.
    """
    p: SamplerPenaltyParams = rule.params
    gap = inputs.log_ratio
    advantages = inputs.advantages
    new = inputs.log_probs.detach().exp()
    old = inputs.old_log_probs.exp()
    threshold = p.threshold or (0.2 if p.region == "dppo" else 0.1)
    outside = torch.zeros_like(gap, dtype=torch.bool)
    if p.region == "dppo":
        outside = torch.where(advantages > 0, new - old > threshold, old - new > threshold)
    elif p.region == "ipo":
        outside = (new - old).abs() > threshold
    elif p.region == "kpop":
        outside = symmetric_binary_kl(new, old) > threshold
    return TokenLoss(p.tau * gap.square() - torch.where(outside, 0.0, advantages * gap.exp()), outside)


def symmetric_binary_kl(new: Tensor, old: Tensor) -> Tensor:
    """The larger KL of both directions between {sampled token, any other}; from probabilities (m,)."""
    new, old = (x.clamp(1e-6, 1.0 - 1e-6) for x in (new, old))
    odds = (new / old).log()
    others = ((1.0 - new) / (1.0 - old)).log()
    return torch.maximum(new * odds + (1.0 - new) * others, -old * odds - (1.0 - old) * others)


def _log_product(inputs: LossInputs) -> Tensor:
    """(m,) log W of the token's response, clamped; a constant."""
    log_ratio = inputs.log_ratio.detach()
    log_w = inputs.unit.sum(log_ratio).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return inputs.unit.spread(log_w.to(log_ratio.dtype))
