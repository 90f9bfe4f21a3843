"""Policy losses: per-token values (B, T), to be aggregated by `rlctl.algos.aggregate`.

Every loss is `loss(rule, log_probs, old_log_probs, advantages, loss_mask, weights) -> TokenLoss`, registered
by its name (`rlctl.registry`). One that forms a ratio π_θ/π_old says so: `needs={"old_log_probs"}`.

- `log_probs`: π_θ with gradient; `old_log_probs`: π_old, a constant; both (B, T), nats;
- `advantages` (B, T), constants; `loss_mask` (B, T) bool, the tokens that count;
- `weights`: importance weights (B, T), constants that multiply the loss; None means 1.

r = π_θ/π_old is formed from a log-ratio clamped to ±20; sg(·) passes its value and no gradient.
Positions outside `loss_mask` are replaced before any arithmetic that mixes or differentiates them, so
that NaN there reaches neither value nor gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlctl.algos.rules import LOG_RATIO_CLAMP, LossRule
from rlctl.lazy import torch
from rlctl.registry import POLICY_LOSSES

if TYPE_CHECKING:
    from torch import Tensor


_CLIP = frozenset({"actor.clip_ratio_low", "actor.clip_ratio_high"})


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss before aggregation.

    Attributes:
        values: (B, T) per-token loss, 0.0 outside the loss mask.
        clipped: (B, T) bool, where the clip was in force (None: the loss has no clip).
        clipped_lower: (B, T) bool, where the second bound was: `ppo_clip`'s dual clip, `dppo`'s
            truncated ratio (None: there is none).
    """

    values: Tensor
    clipped: Tensor | None = None
    clipped_lower: Tensor | None = None


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """What a loss can ask of the whole mini-batch: this rank's rows, and exchanges with all ranks.

    Attributes:
        log_probs, old_log_probs, advantages: (B, T), constants, 0.0 outside the mask.
        mask: (B, T) bool, the tokens that count.
        total: figures of this rank → their sums over all ranks.
        everyones: (N,) values of this rank → those of all ranks, in any order.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    total: Callable[[list[float]], list[float]]
    everyones: Callable[[Tensor], Tensor]

    @property
    def log_ratio(self) -> Tensor:
        """(B, T): log r, clamped; 0.0 outside the mask."""
        return log_ratio(self.log_probs, self.old_log_probs, self.mask)

    @classmethod
    def of(
        cls,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        total: Callable[[list[float]], list[float]] = list,
        everyones: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> WholeBatch:
        """Whatever lies outside the mask replaced, gradients left behind; by default of the only rank."""
        new, old, given = (torch.where(mask, x.detach(), 0.0) for x in (log_probs, old_log_probs, advantages))
        return cls(new, old, given, mask, total, everyones)

    def tell(self, rule: LossRule) -> LossRule:
        """The rule with what its loss needs to know of this mini-batch."""
        find = POLICY_LOSSES.part(rule.name).of_batch
        return rule if find is None else replace(rule, of_batch=find(self, rule))


@POLICY_LOSSES.register(
    label="REINFORCE",
    formula="−w · A · log π_θ",
    source="Williams 1992",
    unbiased=True,
)
def reinforce(
    rule: LossRule,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor | None,
) -> TokenLoss:
    """REINFORCE with importance weights: −w · A · log π_θ. Reads neither rule nor π_old.

    Source: Williams 1992; with w = π_θ/π_rollout the gradient is that of the expected reward under
    π_θ (the reference guide's bypass mode).
    """
    values = -advantages * torch.where(loss_mask, log_probs, 0.0)
    return TokenLoss(weighted(values, weights, loss_mask))


@POLICY_LOSSES.register(
    label="PPO clip, and dual clip with clip_ratio_c",
    formula="−w · min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A)",
    source="Schulman et al. 2017, eq. 7; Ye et al. 2020; Yu et al. 2025, eq. 10",
    needs={"old_log_probs"},
    options=_CLIP | {"actor.clip_ratio_c"},
    unbiased=True,
)
def ppo_clip(
    rule: LossRule,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor | None,
) -> TokenLoss:
    """PPO's clipped surrogate: −w · min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A).

    With `clip_c`, where A < 0 it is −w · max(that min, clip_c·A): a ratio that ran away upwards no
    longer dominates the batch.

    Source: Schulman et al. 2017, eq. 7; Ye et al. 2020, "Mastering Complex Control in MOBA Games"
    (dual clip); unequal halves: Yu et al. 2025, "DAPO", eq. 10.
    """
    ratio = log_ratio(log_probs, old_log_probs, loss_mask).exp()
    values, clipped = clipped_surrogate(ratio, advantages, 1.0 - rule.clip_low, 1.0 + rule.clip_high)
    lower = None
    if rule.clip_c is not None:
        bound = -rule.clip_c * advantages
        lower = (advantages < 0) & (values > bound)
        values = torch.where(lower, bound, values)
        lower = lower & loss_mask
    return TokenLoss(weighted(values, weights, loss_mask), clipped & loss_mask, lower)


@POLICY_LOSSES.register(
    label="GSPO: PPO clip of one ratio per sequence",
    formula="ppo_clip with s = exp(mean_t log r_t)",
    source="Zheng et al. 2025, eqs. 5, 7 and 13",
    needs={"old_log_probs"},
    options=_CLIP,
    unbiased=True,
)
def gspo(
    rule: LossRule,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor | None,
) -> TokenLoss:
    """PPO's surrogate with one ratio per sequence: s = exp(mean_t log r_t), clipped as a whole.

    Token t's ratio is sg(s) · π_θ(t)/sg(π_θ(t)): its value is s, its gradient s · ∇log π_θ(t), so
    that `seq-mean-token-mean` yields GSPO's gradient where a sequence's advantages are equal, and
    GSPO-token's where they are not. The mean is over the row's tokens in `loss_mask`: prompts, tool
    output and rejected tokens change neither s nor its length. Needs whole rows.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", eqs. 5, 7 and 13.
    """
    with torch.no_grad():
        gap = torch.where(loss_mask, log_probs - old_log_probs, 0.0)
        mean_gap = gap.sum(-1, keepdim=True) / loss_mask.sum(-1, keepdim=True).clamp(min=1)
    own = torch.where(loss_mask, log_probs - log_probs.detach(), 0.0)
    ratio = (mean_gap + own).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    values, clipped = clipped_surrogate(ratio, advantages, 1.0 - rule.clip_low, 1.0 + rule.clip_high)
    return TokenLoss(weighted(values, weights, loss_mask), clipped & loss_mask)


@POLICY_LOSSES.register(
    label="CISPO: REINFORCE weighted by the clipped ratio",
    formula="−w · sg(clip(r, 1 − clip_low, 1 + clip_high)) · A · log π_θ",
    source="MiniMax 2025, eqs. 4 and 5",
    needs={"old_log_probs"},
    options=_CLIP,
    unbiased=True,
)
def cispo(
    rule: LossRule,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor | None,
) -> TokenLoss:
    """REINFORCE weighted by the clipped ratio: −w · sg(clip(r, 1 − clip_low, 1 + clip_high)) · A · log π_θ.

    The clip bounds a token's weight; no token loses its gradient.

    Source: MiniMax 2025, "MiniMax-M1", eqs. 4 and 5 (there only `clip_high` binds).
    """
    ratio = log_ratio(log_probs, old_log_probs, loss_mask).exp().detach()
    held = ratio.clamp(1.0 - rule.clip_low, 1.0 + rule.clip_high)
    values = -held * advantages * torch.where(loss_mask, log_probs, 0.0)
    return TokenLoss(weighted(values, weights, loss_mask), (held != ratio) & loss_mask)


@POLICY_LOSSES.register(
    label="SAPO: a smooth gate instead of a clip",
    formula="−w · (4/τ)·σ(τ·(r − 1)) · A, τ = tau_pos where A > 0, else tau_neg",
    source="Gao et al. 2025",
    needs={"old_log_probs"},
    options={"actor.tau_pos", "actor.tau_neg"},
    unbiased=True,
)
def sapo(
    rule: LossRule,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor | None,
) -> TokenLoss:
    """A smooth gate instead of a clip: −w · (4/τ)·σ(τ·(r − 1)) · A, τ = tau_pos where A > 0, else tau_neg.

    At r = 1 the gate's slope is 1, the gradient that of REINFORCE; it fades on both sides.

    Source: Gao et al. 2025, "Soft Adaptive Policy Optimization" (the objective and its gate).
    """
    ratio = log_ratio(log_probs, old_log_probs, loss_mask).exp()
    tau = torch.full_like(ratio, rule.tau_neg).masked_fill(advantages > 0, rule.tau_pos)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return TokenLoss(weighted(-gate * advantages, weights, loss_mask))


@POLICY_LOSSES.register(
    label="DPPO: REINFORCE in a trust region of divergence",
    formula="−w · sg(M · min(r, clip_c)) · A · log π_θ",
    source="Qi et al. 2026",
    needs={"old_log_probs"},
    options=_CLIP | {"actor.clip_ratio_c", "actor.dppo_divergence"},
    unbiased=True,
)
def dppo(
    rule: LossRule,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor | None,
) -> TokenLoss:
    """REINFORCE in a trust region of divergence: −w · sg(M · min(r, clip_c)) · A · log π_θ.

    M is 0 for a token that the update would push further out: A > 0 and π_θ above π_old by more than
    `clip_high`, or A < 0 and below by more than `clip_low`; else 1. How far apart they are is measured
    between the two-outcome distributions {sampled token, any other}: total variation |π_θ − π_old|, or
    KL(π_old ‖ π_θ). Unlike r, these let rare tokens move and hold frequent ones.

    Source: Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning" (DPPO-Binary).
    """
    ratio = log_ratio(log_probs, old_log_probs, loss_mask).exp().detach()
    kept, old = (torch.where(loss_mask, x, 0.0) for x in (log_probs, old_log_probs.detach()))
    distance = _binary_divergence(rule, kept.detach(), old)
    rising = (advantages > 0) & (kept > old) & (distance > rule.clip_high)
    falling = (advantages < 0) & (kept < old) & (distance > rule.clip_low)
    clipped = (rising | falling) & loss_mask
    lower = None
    if rule.clip_c is not None:
        lower = (ratio > rule.clip_c) & loss_mask & ~clipped
        ratio = ratio.clamp(max=rule.clip_c)
    values = -torch.where(clipped, 0.0, ratio) * advantages * kept
    return TokenLoss(weighted(values, weights, loss_mask), clipped, lower)


def log_ratio(log_probs: Tensor, old_log_probs: Tensor, loss_mask: Tensor) -> Tensor:
    """(B, T): log r, clamped; 0.0 outside the mask."""
    gap = torch.where(loss_mask, log_probs - old_log_probs.detach(), 0.0)
    return gap.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, lower: float, upper: float) -> tuple[Tensor, Tensor]:
    """The pessimistic of the free and the clipped surrogate, and where it is the clipped one."""
    free, held = -advantages * ratio, -advantages * ratio.clamp(lower, upper)
    return torch.maximum(free, held), held > free


def _binary_divergence(rule: LossRule, log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Between the distributions {sampled token, any other} of both policies, (B, T)."""
    prob, old = log_probs.exp(), old_log_probs.exp()
    if rule.divergence == "tv":
        return (prob - old).abs()
    rest, old_rest = (-x.expm1() for x in (log_probs, old_log_probs))
    tiny = 1e-8  # a token of probability 1 leaves nothing to the others
    return (
        old * (old_log_probs - log_probs) + old_rest * (old_rest.clamp(min=tiny) / rest.clamp(min=tiny)).log()
    )


def weighted(values: Tensor, weights: Tensor | None, loss_mask: Tensor) -> Tensor:
    """Apply detached weights; zero outside the mask even where a weight is not finite."""
    if weights is not None:
        values = values * torch.where(loss_mask, weights.detach(), 0.0)
    return torch.where(loss_mask, values, 0.0)
