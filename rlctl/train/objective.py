"""One micro-batch's share of the actor's loss: policy gradient, entropy bonus, KL to the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from rlctl.algos.correction_records import Correction
from rlctl.algos.kl import kl_loss
from rlctl.algos.losses import Denominators, aggregate, policy_loss
from rlctl.algos.metric_sums import Additive, V
from rlctl.algos.rules import LossRule
from rlctl.algos.score_centering import expected_score
from rlctl.batch import TrainBatch
from rlctl.engine.protocol import PolicyOutput
from rlctl.engine.routing import balance_loss
from rlctl.errors import RunFailure
from rlctl.train.settings import UpdateSettings


@dataclass(frozen=True, slots=True)
class BatchNormalizers:
    """Statistics of a whole mini-batch that its loss needs."""

    denominators: Denominators
    factor: float  # mean weight; weights are divided by it
    loss: LossRule  # with the statistics that the loss function reads
    experts: ExpertShares | None = None  # None: there is no auxiliary loss


@dataclass(frozen=True, slots=True)
class ExpertShares:
    """Routing of the response tokens of a whole mini-batch.

    Attributes:
        shares: (E,) share of the tokens that goes to each expert.
        num_tokens: number of these tokens.
    """

    shares: Tensor
    num_tokens: float


@dataclass(frozen=True, slots=True)
class LossSums(Additive, Generic[V]):
    """Sums of the actor's loss over micro-batches, for `actor/*` metrics.

    Attributes:
        loss, pg_loss, kl_loss: the whole loss, and its terms before their coefficients.
        nonfinite: sequences with NaN or infinite log-probs that the correction did not detect.
        listed_mass: Σ over tokens of the probability of the tokens that the sampler listed; None without
            score centering.
        tokens, clipped, clipped_lower: numbers of tokens.
        entropy, ppo_kl: Σ over tokens, in nats.
        router_aux_loss: the auxiliary loss of a mixture of experts; None without it.
    """

    loss: V
    pg_loss: V
    kl_loss: V
    nonfinite: V
    listed_mass: V | None
    tokens: V
    clipped: V
    clipped_lower: V
    entropy: V
    ppo_kl: V
    router_aux_loss: V | None = None

    def scaled(self: LossSums[float], scale: float) -> LossSums[float]:
        """With the loss and its terms times `scale`."""
        pg_loss, kl_loss = self.pg_loss * scale, self.kl_loss * scale
        return replace(self, loss=self.loss * scale, pg_loss=pg_loss, kl_loss=kl_loss)


def actor_loss(
    micro: TrainBatch,
    output: PolicyOutput,
    correction: Correction,
    normalizers: BatchNormalizers,
    settings: UpdateSettings,
) -> tuple[Tensor, LossSums[Tensor]]:
    """This micro-batch's share of the mini-batch loss, with gradient, and the sums for `actor/*` metrics.

    Rejected tokens are excluded from all three terms; `loss_denominator` of the rules decides whether the
    denominator counts them.
    """
    mask = micro.valid_mask
    loss_mask = mask & correction.keep_mask
    denominator_mask = loss_mask if settings.rules.loss_denominator == "after_rejection" else mask

    def mean(values: Tensor) -> Tensor:
        return aggregate(
            values, denominator_mask, normalizers.denominators, settings.agg_mode, horizon=settings.horizon
        )

    weights = correction.weights if settings.weights_are_applied else None
    if weights is not None:
        weights = weights / normalizers.factor
    policy = policy_loss(
        normalizers.loss, output.log_probs, micro.old_log_probs, micro.advantages, loss_mask, weights
    )
    loss = pg_loss = mean(policy.values)
    listed_mass = None
    if settings.centers_scores:
        expected, listed_mass = _expected_scores(micro, output, loss_mask, settings)
        advantages = torch.where(loss_mask, micro.advantages, 0.0)
        loss = pg_loss = pg_loss + mean(advantages * expected / normalizers.factor)
    if settings.entropy_coeff:
        loss = loss - settings.entropy_coeff * mean(torch.where(loss_mask, output.entropy, 0.0))
    kl = torch.zeros_like(pg_loss)
    if settings.kl_loss_type is not None:
        assert micro.ref_log_probs is not None
        # Relative to π_rollout in both modes, because the tokens were sampled from it.
        policies = (output.log_probs, micro.ref_log_probs, micro.rollout_log_probs)
        kl = mean(kl_loss(settings.kl_loss_type, *policies, loss_mask))
        loss = loss + settings.kl_loss_coef * kl
    balance = None
    if normalizers.experts is not None:
        assert output.routing is not None
        routing = output.routing[mask[micro.response_mask]]
        balance = balance_loss(routing, normalizers.experts.shares, normalizers.experts.num_tokens)
        loss = loss + settings.router_aux_loss_coef * balance
    # Rows that the correction did not detect: in decoupled mode it does not read π_θ.
    nonfinite = nonfinite_rows(output.log_probs, mask) & ~correction.nonfinite
    drift = (micro.old_log_probs - output.log_probs).detach()
    return loss, LossSums(
        loss=loss.detach().double(),
        pg_loss=pg_loss.detach().double(),
        kl_loss=kl.detach().double(),
        nonfinite=nonfinite.sum().double(),
        listed_mass=None if listed_mass is None else _total(listed_mass, mask),
        tokens=mask.sum().double(),
        clipped=_count(policy.clipped, mask),
        clipped_lower=_count(policy.clipped_lower, mask),
        entropy=_total(output.entropy.detach(), mask),
        ppo_kl=_total(drift, mask),
        router_aux_loss=None if balance is None else balance.detach().double(),
    )


def _expected_scores(
    micro: TrainBatch, output: PolicyOutput, loss_mask: Tensor, settings: UpdateSettings
) -> tuple[Tensor, Tensor]:
    """Two (B, T): `expected_score` at each token, and the probability of the tokens that the sampler listed.

    Raises:
        RunFailure: the rollout engine listed no tokens.
    """
    if micro.most_likely is None or output.most_likely is None:
        key = "algorithm.rollout_correction.score_centering"
        what, fix = "the rollout engine did not list the most likely tokens", "set rollout.name: hf or vllm"
        raise RunFailure(what, where=key, fix=fix)
    scored = micro.response_mask
    _, rollout_log_probs = micro.most_likely.padded(scored)
    log_probs = torch.where(loss_mask[scored][:, None], output.most_likely, 0.0)
    expected = expected_score(log_probs, rollout_log_probs, settings.rules.weight)
    none = torch.zeros_like(micro.advantages)
    mass = none.masked_scatter(scored, rollout_log_probs.exp().sum(-1))
    return none.masked_scatter(scored, expected), mass


def nonfinite_rows(log_probs: Tensor, mask: Tensor) -> Tensor:
    """(B,) bool: rows with a NaN or infinite log-prob where `mask` is True; both arguments (B, T)."""
    return (mask & ~log_probs.detach().isfinite()).any(-1)


def _total(values: Tensor, mask: Tensor) -> Tensor:
    """() float64: the sum of the finite values where `mask` is True."""
    return torch.where(mask & values.isfinite(), values, 0.0).sum().double()


def _count(flags: Tensor | None, like: Tensor) -> Tensor:
    """() float64: the number of True values; 0 for None."""
    return torch.zeros_like(like[0, 0], dtype=torch.float64) if flags is None else flags.sum().double()
