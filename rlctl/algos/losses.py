"""Losses of policy and critic: a column of the m tokens of the loss, and the coefficients that add them up.

Every policy loss is `loss(rule, inputs) -> TokenLoss`, registered by its name (`rlctl.registry`). A loss that
uses the ratio r = π_θ/π_old declares `needs={"old_log_probs"}`. `policy_loss` calls the loss and multiplies
its values by the importance weights w, which are constants. Rejected tokens are in no column. sg(·) is the
stop-gradient operator. The loss of a mini-batch is Σ_t c_t · ℓ_t, see `coefficients`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from rlctl.algos.rules import LOG_RATIO_CLAMP, AggMode, LossRule
from rlctl.errors import RunFailure
from rlctl.lazy import torch
from rlctl.registry import POLICY_LOSSES, ClipBand, Function, PartInputs

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.segments import Segments

CLIP_OPTIONS = frozenset({"actor.clip_ratio_low", "actor.clip_ratio_high"})


@dataclass(frozen=True, slots=True)
class LossInputs(PartInputs):
    """Inputs of a loss: columns of its m tokens, those of one response after those of the other.

    Attributes:
        log_probs: (m,) log π_θ of the tokens, nats, with gradient.
        old_log_probs: (m,) log π_old, a constant; log π_rollout in bypass mode.
        advantages: (m,), constants.
        unit: the tokens of each response, for losses of whole responses; a response may have none.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    unit: Segments

    removed: ClassVar = {"mask": "each entry of a column is a token of the loss"}

    @property
    def log_ratio(self) -> Tensor:
        """(m,): log r, clamped to ±20."""
        return (self.log_probs - self.old_log_probs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)

    @property
    def ratio(self) -> Tensor:
        """(m,): r = π_θ/π_old."""
        return self.log_ratio.exp()


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss before aggregation.

    Attributes:
        values: (m,) per-token loss.
        clipped: (m,) bool, where the clip is active (None: the loss has no clip).
        clipped_lower: (m,) bool, where the second bound is active: `ppo_clip`'s dual clip, `dppo`'s
            truncated ratio (None: there is none).
    """

    values: Tensor
    clipped: Tensor | None = None
    clipped_lower: Tensor | None = None


def ratio_loss(**arguments: Any) -> Callable[[Function], Function]:
    """Decorator that registers a loss with the ratio r; `arguments` as of `Registry.register`.

    Unless they say otherwise, its expected on-policy gradient is that of the expected reward, and tokens with
    advantage 0 have none.
    """
    usual: dict[str, Any] = {"needs": {"old_log_probs"}, "unbiased": True, "vanishes_without_advantage": True}
    return POLICY_LOSSES.register(**usual | arguments)


def policy_loss(
    rule: LossRule,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    unit: Segments,
    weights: Tensor | None,
) -> TokenLoss:
    """w times the loss of every token; float32 for inputs in half precision.

    Args:
        rule: which loss, and its parameters.
        log_probs, old_log_probs, advantages, unit: as in `LossInputs`.
        weights: (m,) importance weights w; None means 1. No gradient flows into them.

    Raises:
        RunFailure: the loss returns something else than one value per token, or has no gradient.
    """
    new, old, given = (widened(x) for x in (log_probs, old_log_probs.detach(), advantages))
    loss: TokenLoss = POLICY_LOSSES[rule.name](rule, LossInputs(new, old, given, unit))
    _check_returned(loss, new, rule.name)
    return loss if weights is None else replace(loss, values=loss.values * weights.detach())


def widened(values: Tensor) -> Tensor:
    """Half precision as float32, so that nothing but the input is rounded; other tensors stay."""
    return values.float() if values.itemsize < 4 else values


def clamped_exp(log_weight: Tensor) -> Tensor:
    """exp(clip(log w, ±20))."""
    return log_weight.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp_()


def _check_returned(loss: object, log_probs: Tensor, name: str) -> None:
    if not isinstance(loss, TokenLoss):
        message = f"policy loss {name} returned {type(loss).__name__}"
        fix = "return TokenLoss(values)"
        raise RunFailure(message, where=POLICY_LOSSES.key, fix=fix)
    POLICY_LOSSES.check_returned(name, loss.values, tuple(log_probs.shape))
    for field in ("clipped", "clipped_lower"):
        mask = getattr(loss, field)
        if mask is not None:
            POLICY_LOSSES.check_returned(f"{name} ({field})", mask, tuple(log_probs.shape))
            if mask.dtype != torch.bool:
                message = f"policy loss {name} returned {field} as {mask.dtype}"
                fix = "return bool, or None"
                raise RunFailure(message, where=POLICY_LOSSES.key, fix=fix)
    POLICY_LOSSES.check_gradient(name, loss.values, log_probs, "inputs.log_probs")


@POLICY_LOSSES.register(
    formula="−w · A · log π_θ",
    source="Williams 1992",
    unbiased=True,
    vanishes_without_advantage=True,
)
def reinforce(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """REINFORCE.

    With sequence weights w = π_θ/π_rollout the gradient is that of the expected reward under π_θ.
    """
    return TokenLoss(-inputs.advantages * inputs.log_probs)


@ratio_loss(
    formula="−w · min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A)",
    source="Schulman et al. 2017, eq. 7; dual clip: Ye et al. 2020; asymmetric bounds: Yu et al. 2025, DAPO",
    options=CLIP_OPTIONS | {"actor.clip_ratio_c"},
    clip=ClipBand("PPO clip"),
)
def ppo_clip(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """PPO clip, and dual clip with clip_ratio_c.

    With `clip_c`, where A < 0 it is −w · max(min(…), clip_c·A): a very large ratio does not dominate.
    """
    return clipped_surrogate(inputs.ratio, inputs.advantages, *rule.interval, rule.clip_c)


@ratio_loss(
    formula="ppo_clip with s = exp(mean_t log r_t)",
    source="Zheng et al. 2025, Group Sequence Policy Optimization, eq. 5",
    options=CLIP_OPTIONS,
    clip=ClipBand("GSPO clip", "the geometric mean of a response's ratios"),
)
def gspo(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """GSPO: PPO clip of one ratio per sequence.

    The ratio of a sequence is clipped as a whole.

    Token t's ratio is sg(s) · π_θ(t)/sg(π_θ(t)): its value is s, its gradient s · ∇log π_θ(t), so
    that `seq-mean-token-mean` yields GSPO's gradient where a sequence's advantages are equal, and
    GSPO-token's where they are not. The mean is over the tokens of the loss: prompts, tool output and
    rejected tokens change neither s nor its length. Needs complete responses.
    """
    fixed = inputs.log_probs.detach()
    mean_gap = inputs.unit.mean(fixed - inputs.old_log_probs).to(fixed.dtype)
    log_s = inputs.unit.spread(mean_gap) + inputs.log_probs - fixed
    return clipped_surrogate(clamped_exp(log_s), inputs.advantages, *rule.interval)


@ratio_loss(
    formula="−w · sg(clip(r, 1 − clip_low, 1 + clip_high)) · A · log π_θ",
    source="MiniMax 2025, MiniMax-M1 (there only clip_high is active)",
    options=CLIP_OPTIONS,
    clip=ClipBand("CISPO clip", outside="the nearer bound is the weight of the token's gradient"),
)
def cispo(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """CISPO: REINFORCE weighted by the clipped ratio.

    The clip bounds a token's weight; no token loses its gradient.
    """
    ratio = inputs.ratio.detach()
    bounded = ratio.clamp(*rule.interval)
    return TokenLoss(-bounded * inputs.advantages * inputs.log_probs, bounded != ratio)


@ratio_loss(
    formula="−w · (4/τ)·σ(τ·(r − 1)) · A, τ = tau_pos where A > 0, else tau_neg",
    source="Gao et al. 2025, Soft Adaptive Policy Optimization",
    options={"actor.tau_pos", "actor.tau_neg"},
)
def sapo(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """SAPO: a smooth gate instead of a clip.

    At r = 1 the gate's slope is 1, the gradient of REINFORCE; the slope decreases on both sides.
    """
    ratio = inputs.ratio
    tau = torch.full_like(ratio, rule.tau_neg).masked_fill(inputs.advantages > 0, rule.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return TokenLoss(-gate * inputs.advantages)


@ratio_loss(
    formula="−w · sg(M · min(r, clip_c)) · A · log π_θ",
    source="Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning (DPPO-Binary)",
    options=CLIP_OPTIONS | {"actor.clip_ratio_c", "actor.dppo_divergence"},
)
def dppo(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """DPPO: REINFORCE in a trust region of divergence.

    A bound on divergence, not on r: rare tokens may change more, frequent ones less.

    M is 0 for a token that the update would move further out of the region: A > 0 and π_θ above π_old by
    more than `clip_high`, or A < 0 and below by more than `clip_low`; else 1. The distance is that of the
    two-outcome distributions {sampled token, any other}: total variation |π_θ − π_old|, or KL(π_old ‖ π_θ).
    """
    ratio = inputs.ratio.detach()
    new = inputs.log_probs.detach()
    old = inputs.old_log_probs
    advantages = inputs.advantages
    distance = _binary_divergence(rule, new, old)
    rising = (advantages > 0) & (new > old) & (distance > rule.clip_high)
    falling = (advantages < 0) & (new < old) & (distance > rule.clip_low)
    clipped = rising | falling
    lower = None
    if rule.clip_c is not None:
        lower = (ratio > rule.clip_c) & ~clipped
        ratio = ratio.clamp(max=rule.clip_c)
    return TokenLoss(-torch.where(clipped, 0.0, ratio) * advantages * inputs.log_probs, clipped, lower)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, lower: float, upper: float, clip_c: float | None = None
) -> TokenLoss:
    """The larger of −r·A and −clip(r, lower, upper)·A; with `clip_c`, at most −clip_c·A where A < 0."""
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(lower, upper)
    return larger_of(unclipped, bounded, advantages, None if clip_c is None else -clip_c * advantages)


def larger_of(unclipped: Tensor, bounded: Tensor, advantages: Tensor, bound: Tensor | None) -> TokenLoss:
    """The larger of a loss and its clipped form, all (m,); with `bound`, at most that where A < 0."""
    values = torch.maximum(unclipped, bounded)
    clipped = bounded > unclipped
    if bound is None:
        return TokenLoss(values, clipped)
    runaway = (advantages < 0) & (values > bound)
    return TokenLoss(torch.where(runaway, bound, values), clipped, runaway)


def _binary_divergence(rule: LossRule, log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Divergence between the distributions {sampled token, any other} of both policies, (m,)."""
    prob = log_probs.exp()
    old = old_log_probs.exp()
    if rule.divergence == "tv":
        return (prob - old).abs()
    rest, old_rest = (-x.expm1() for x in (log_probs, old_log_probs))
    tiny = 1e-8  # for tokens of probability 1, where the rest is 0
    return (
        old * (old_log_probs - log_probs) + old_rest * (old_rest.clamp(min=tiny) / rest.clamp(min=tiny)).log()
    )


# --- the critic --------------------------------------------------------------------------------------


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> TokenLoss:
    """Squared error with PPO's value clip: ½ · max((v − R)², (clip(v, v_old ± clip) − R)²).

    A value that has moved by more than `clip` towards its return gets no further gradient. The paper does
    not contain this clip; OpenAI's PPO code (`baselines/ppo2`, Schulman et al. 2017) does.

    Args:
        values: (m,) the critic's predictions, with gradient.
        old_values: (m,) its predictions before the first update on this batch; constants.
        returns: (m,) target values; constants.
        clip: `critic.cliprange_value`, in units of reward.
    """
    new, old, target = (widened(x) for x in (values, old_values.detach(), returns.detach()))
    unclipped = (new - target).square()
    bounded = (new.clamp(old - clip, old + clip) - target).square()
    return TokenLoss(0.5 * torch.maximum(unclipped, bounded), clipped=bounded > unclipped)


# --- aggregation -------------------------------------------------------------------------------------


def coefficients(
    mode: AggMode,
    kept: Tensor,
    counted: Tensor,
    unit: Segments,
    num_tokens: float,
    num_units: float,
    *,
    horizon: int,
) -> Tensor:
    """(M,) float32: c_t, such that Σ_t c_t · ℓ_t over all micro-batches and ranks is the mini-batch loss.

    The mean of micro-batch means is not the mean: tokens of short micro-batches would weigh more. The
    coefficients therefore use counts over the whole mini-batch on all ranks, so the shares add up to the
    same number for any division of the mini-batch that leaves responses whole.

    Args:
        mode: `token-mean` Σ/tokens (DAPO); `seq-mean-token-sum` Σ/responses; `seq-mean-token-mean`
            mean over responses of each response's mean (GRPO); `seq-mean-token-sum-norm`
            Σ/(responses · horizon) (Dr. GRPO).
        kept: (M,) bool, tokens of the loss; c_t is 0.0 for all others.
        counted: (M,) bool, tokens that the denominators count: those kept, or all before rejection.
        unit: the tokens (M,) of each response.
        num_tokens: number of counted tokens of the mini-batch, on all ranks.
        num_units: number of its responses with at least one such token.
        horizon: the constant length of `seq-mean-token-sum-norm`, `data.max_response_length`.
    """
    if mode == "token-mean":
        return kept.float() / max(num_tokens, 1.0)
    if mode == "seq-mean-token-mean":
        lengths = unit.sum(counted).clamp(min=1.0)
    else:
        lengths = torch.full_like(unit.lengths, horizon if mode.endswith("norm") else 1, dtype=torch.float64)
    return torch.where(kept, unit.spread(1.0 / (lengths * max(num_units, 1.0))), 0.0).float()
