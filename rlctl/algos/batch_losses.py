"""Policy losses that need statistics of the whole mini-batch, over all micro-batches and ranks.

The function registered as `batch_statistics` computes them; the loss reads its result from
`rule.batch_statistics`. The result does not depend on how the mini-batch is divided. With several
micro-batches these losses need a second forward pass, in decoupled mode too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import Field

from rlctl.algos.kl import never_negative
from rlctl.algos.losses import CLIP_OPTIONS, LossInputs, TokenLoss, clipped_surrogate
from rlctl.algos.more_losses import LossParams, experimental_loss
from rlctl.algos.rules import LossRule
from rlctl.errors import known
from rlctl.lazy import torch
from rlctl.registry import POLICY_LOSSES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WholeBatch(LossInputs):
    """Inputs of `batch_statistics`: this rank's tokens, and collectives over all ranks; by default one rank.

    Attributes:
        total: numbers of this rank → their sums over all ranks.
        all_gather: (n,) values of this rank → those of all ranks, in any order.
    """

    total: Callable[[list[float]], list[float]] = list
    all_gather: Callable[[Tensor], Tensor] = lambda values: values

    def with_statistics(self, rule: LossRule) -> LossRule:
        """The rule with the `batch_statistics` that its loss needs of this mini-batch."""
        find = POLICY_LOSSES.part(rule.name).batch_statistics
        with torch.no_grad():
            return rule if find is None else replace(rule, batch_statistics=find(self, rule))


def _effective_sample_size(batch: WholeBatch, rule: LossRule) -> float:
    """(Σr)² / (n Σr²) over tokens; 1 without tokens."""
    ratio = batch.ratio.double()
    total, squares, n = batch.total([float(ratio.sum()), float(ratio.square().sum()), float(len(ratio))])
    return total * total / (n * squares) if squares > 0 else 1.0


@experimental_loss(
    formula="w · (−sg(min(r, ESS)) · A · log π_θ + (1 − ESS) · k3(π_θ, π_old))",
    source="Fakoor et al. 2026, arXiv 2605.12380; from FeynRL's code",
    batch_statistics=_effective_sample_size,
    vanishes_without_advantage=False,
)
def p3o(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """P3O: the effective sample size bounds the ratio and weighs a KL.

    ESS = (Σr)² / (n Σr²) over the tokens of the mini-batch. There are no hyperparameters.
    """
    ess: float = rule.batch_statistics
    ratio = inputs.ratio.detach()
    policy = -ratio.clamp(max=ess) * inputs.advantages * inputs.log_probs
    distance = never_negative(inputs.log_probs, inputs.old_log_probs)
    return TokenLoss(policy + (1.0 - ess) * distance, ratio > ess)


class M2poParams(LossParams):
    """Upper bound of the mean of log² r after tokens are dropped."""

    budget: float = Field(0.04, gt=0)


def _pushed_out(log_r: Tensor, advantages: Tensor) -> Tensor:
    """Tokens where the update would move π_θ further from π_old: A > 0 and r > 1, or A < 0 and r < 1."""
    return advantages * log_r > 0


def _largest_kept(batch: WholeBatch, rule: LossRule) -> float:
    """Largest log² r for which the mean of all values up to it is within the budget, or 0.0.

    Equal values are kept or dropped together.
    """
    log_r = batch.log_ratio
    squares = log_r[_pushed_out(log_r, batch.advantages)].square().double()
    values, counts = torch.unique(batch.all_gather(squares), return_counts=True)  # ascending
    means = (values * counts).cumsum(0) / counts.cumsum(0)
    kept = values[means <= rule.params.budget]
    return float(kept[-1]) if len(kept) else 0.0


@experimental_loss(
    formula="−w · M · r · A; where A·log r > 0 the largest log² r are dropped until their mean ≤ budget",
    source="Zheng et al. 2025, arXiv 2510.01161; as masks in AReaL's code, which applies it to all tokens",
    params=M2poParams,
    batch_statistics=_largest_kept,
)
def m2po(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """M2PO: drops the tokens with the largest log² r until the second moment of log r is small.

    One bound for the whole mini-batch, so that few tokens are dropped while π_θ is near π_old.

    A mean equal to the budget is within it, equal values are dropped together, and all may be dropped.
    """
    log_r = inputs.log_ratio
    fixed = log_r.detach()
    is_far = fixed.square().double() > rule.batch_statistics * (1.0 + 1e-6)
    dropped = is_far & _pushed_out(fixed, inputs.advantages)
    return TokenLoss(-inputs.advantages * torch.where(dropped, 0.0, log_r.exp()), dropped)


class BapoParams(LossParams):
    """Initial and largest bounds of the ratio, their steps, and the target balance."""

    target: float = Field(1.0, ge=0)
    """Σ of positive contributions / Σ of negative ones."""
    lower: float = Field(0.6, gt=0)
    lower_max: float = Field(0.8, gt=0)
    lower_step: float = Field(0.05, gt=0)
    upper: float = Field(1.2, gt=0)
    upper_max: float = Field(2.0, gt=0)
    upper_step: float = Field(0.05, gt=0)


def _steps(start: float, stop: float, step: float) -> list[float]:
    """start, start + step, … and stop."""
    count = max(0, int((stop - start) / step + 1e-9))
    edges = [start + step * index for index in range(count + 1)]
    return edges if edges[-1] >= stop - 1e-9 else [*edges, stop]


def _balanced_bounds(batch: WholeBatch, rule: LossRule) -> tuple[float, float]:
    """Raises the lower bound, then the upper one, until contributions balance or both reach their maximum."""
    p: BapoParams = rule.params
    lowers = _steps(p.lower, p.lower_max, p.lower_step)
    uppers = _steps(p.upper, p.upper_max, p.upper_step)
    ratio = batch.ratio.double()
    good = batch.advantages.double().clamp(min=0.0)
    bad = -batch.advantages.double().clamp(max=0.0)
    bounds = [(low, uppers[0]) for low in lowers] + [(lowers[-1], up) for up in uppers[1:]]
    gains = batch.total([float((ratio.clamp(max=up) * good).sum()) for _, up in bounds])
    losses = batch.total([float((ratio.clamp(min=low) * bad).sum()) for low, _ in bounds])
    sums = zip(bounds, gains, losses, strict=True)
    return next((pair for pair, gain, loss in sums if gain >= p.target * loss), bounds[-1])


@experimental_loss(
    formula="ppo_clip with bounds raised until Σ_{A>0} min(r, hi)·A ≥ target · Σ_{A<0} max(r, lo)·|A|",
    source="Xi et al. 2025, arXiv 2510.18927; from the authors' code",
    options={"actor.clip_ratio_c"},
    params=BapoParams,
    batch_statistics=_balanced_bounds,
)
def bapo(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """BAPO: PPO clip whose bounds balance positive and negative contributions.

    The bounds are those of the ratio itself, initially [0.6, 1.2]; `clip_ratio_c` as in `ppo_clip`.
    """
    lower, upper = rule.batch_statistics
    return clipped_surrogate(inputs.ratio, inputs.advantages, lower, upper, rule.clip_c)


class KlCovParams(LossParams):
    """Fraction of the tokens that are penalised, and the penalty's coefficient."""

    fraction: float = Field(0.0002, gt=0, le=1)
    kl_coef: float = Field(1.0, ge=0)


def _covariance(inputs: LossInputs, means: tuple[float, float]) -> Tensor:
    """(A − mean A) · (log π_θ − mean log π_θ) of each token, a constant."""
    return (inputs.advantages.double() - means[0]) * (inputs.log_probs.detach().double() - means[1])


def _means(batch: WholeBatch) -> tuple[tuple[float, float], float]:
    """Mean advantage and mean log-prob of the tokens, and their number."""
    sums = [float(x.double().sum()) for x in (batch.advantages, batch.log_probs)]
    advantage, log_prob, n = batch.total([*sums, float(len(batch.log_probs))])
    return (advantage / max(n, 1.0), log_prob / max(n, 1.0)), n


def _covariance_bound(batch: WholeBatch, rule: LossRule) -> tuple[tuple[float, float], float]:
    """Means as in `_means`, and the k-th largest covariance, k = max(1, fraction · tokens)."""
    means, _ = _means(batch)
    values = batch.all_gather(_covariance(batch, means))
    k = max(1, int(len(values) * rule.params.fraction))
    return means, float(values.topk(min(k, len(values))).values[-1]) if len(values) else float("inf")


@experimental_loss(
    formula="w · (−r·A + coef · |log r| for the `fraction` of tokens of largest covariance)",
    source="Cui et al. 2025, arXiv 2505.22617; from verl's code",
    params=KlCovParams,
    batch_statistics=_covariance_bound,
    vanishes_without_advantage=False,
)
def kl_cov(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """KL-Cov: a penalty on the tokens whose log-prob and advantage have the largest covariance.

    Penalises tokens of high covariance, because these lower the entropy; equal values alike.
    """
    means, least = rule.batch_statistics
    log_r = inputs.log_ratio
    penalised = _covariance(inputs, means) >= least
    penalty = torch.where(penalised, rule.params.kl_coef * log_r.abs(), 0.0)
    return TokenLoss(penalty - inputs.advantages * log_r.exp(), penalised)


class ClipCovParams(LossParams):
    """Fraction of the tokens that are dropped, and the covariances between which they are chosen."""

    fraction: float = Field(0.0002, gt=0, le=1)
    low: float = 1.0
    high: float = 5.0


def _clip_and_choose(
    rule: LossRule, inputs: LossInputs, means: tuple[float, float]
) -> tuple[TokenLoss, Tensor]:
    """PPO's clipped loss, and the tokens in the range of covariances that it does not clip."""
    loss = clipped_surrogate(inputs.ratio, inputs.advantages, *rule.interval)
    covariance = _covariance(inputs, means)
    return loss, (covariance > rule.params.low) & (covariance < rule.params.high) & ~known(loss.clipped)


def _survival(batch: WholeBatch, rule: LossRule) -> tuple[tuple[float, float], float]:
    """Means as in `_means`, and the share of the tokens in the range that is not dropped."""
    means, n = _means(batch)
    _, chosen = _clip_and_choose(rule, batch, means)
    [candidates] = batch.total([float(chosen.sum())])
    dropped = max(1, int(n * rule.params.fraction))
    return means, max(0.0, 1.0 - dropped / max(candidates, 1.0))


@experimental_loss(
    formula="ppo_clip · (1 − k/m) for the m tokens of covariance in (low, high), k = fraction · tokens",
    source="Cui et al. 2025, arXiv 2505.22617; from verl's code, averaged over its random choice",
    options=CLIP_OPTIONS,
    params=ClipCovParams,
    batch_statistics=_survival,
    unbiased=False,
)
def clip_cov(rule: LossRule, inputs: LossInputs) -> TokenLoss:
    """Clip-Cov: PPO clip that drops a few tokens of high covariance.

    The source drops k of the m tokens at random; here each has the expected weight 1 − k/m.

    The expected gradient is the same, and no random numbers are needed.
    """
    means, survival = rule.batch_statistics
    loss, chosen = _clip_and_choose(rule, inputs, means)
    return TokenLoss(torch.where(chosen, survival, 1.0) * loss.values, loss.clipped)
