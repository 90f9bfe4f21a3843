"""One micro-batch's share of the actor's loss: policy gradient, entropy, KL to reference and teacher."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.algos.correction import Correction
from rlctl.algos.kl import kl_loss, top_k_kl
from rlctl.algos.losses import coefficients, policy_loss
from rlctl.algos.rules import LossRule
from rlctl.algos.score_centering import expected_score
from rlctl.algos.segments import Segments, Sums
from rlctl.batch import TokenBatch
from rlctl.engine.protocol import PolicyOutput
from rlctl.errors import RunFailure
from rlctl.routing import balance_loss
from rlctl.train.settings import UpdateSettings


@dataclass(frozen=True, slots=True)
class BatchNormalizers:
    """Statistics of a whole mini-batch, over all of its micro-batches and ranks, that its loss needs.

    Attributes:
        num_tokens, num_responses: counted by the denominators; responses with at least one such token.
        factor: mean weight; weights are divided by it.
        loss: with the statistics that the loss function reads.
        expert_shares: (E,) share of the tokens that goes to each expert; None: there is no auxiliary loss.
        routed_tokens: number of these tokens.
    """

    num_tokens: float
    num_responses: float
    factor: float
    loss: LossRule
    expert_shares: Tensor | None = None
    routed_tokens: float = 0.0


def actor_loss(
    micro: TokenBatch,
    output: PolicyOutput,
    correction: Correction,
    normalizers: BatchNormalizers,
    settings: UpdateSettings,
) -> tuple[Tensor, Sums]:
    """This micro-batch's share of the mini-batch loss, with gradient, and the sums for `actor/*` metrics.

    Every term is Σ_t c_t · ℓ_t over the kept tokens, with the same coefficients c; rejected tokens are in
    none.

    Sums: loss, pg_loss, kl_loss and router_aux_loss before their coefficients; nonfinite, responses with NaN
    or infinite log-probs that the correction did not detect; numbers of tokens, clipped and clipped_lower;
    entropy and ppo_kl over tokens, in nats; listed_mass, probability of the tokens that the sampler listed;
    teacher_kl over the loss's tokens, `distilled` in number, and the policy's probability `tail_mass` of what
    is not among the teacher's most likely tokens.
    """
    keep, rules = correction.keep, settings.rules
    unit = rules.segments(micro.units, "sequence")
    counted = keep if rules.loss_denominator == "after_rejection" else torch.ones_like(keep)
    c = coefficients(
        settings.agg_mode,
        keep,
        counted,
        unit,
        normalizers.num_tokens,
        normalizers.num_responses,
        horizon=settings.horizon,
    )[keep]
    assert micro.old_log_probs is not None
    assert micro.advantages is not None
    log_probs, old, advantages = (x[keep] for x in (output.log_probs, micro.old_log_probs, micro.advantages))
    kept_unit = unit.kept(keep)
    weights = None
    if correction.weights is not None and settings.weights_are_applied:
        weights = correction.weights[keep] / normalizers.factor
    policy = policy_loss(normalizers.loss, log_probs, old, advantages, kept_unit, weights)
    loss = pg_loss = (c * policy.values).sum()
    more: Sums = {}
    if settings.centers_scores:
        expected, mass = _expected_scores(micro, output, keep, settings)
        loss = pg_loss = pg_loss + (c * advantages * expected).sum() / normalizers.factor
        more["listed_mass"] = _total(mass)
    if settings.entropy_coeff:
        loss = loss - settings.entropy_coeff * (c * output.entropy[keep]).sum()
    kl = torch.zeros_like(pg_loss)
    if settings.kl_loss_type is not None:
        assert micro.ref_log_probs is not None
        # Relative to π_rollout in both modes, because the tokens were sampled from it.
        policies = (micro.ref_log_probs[keep], micro.rollout_log_probs[keep])
        kl = (c * kl_loss(settings.kl_loss_type, log_probs, *policies, kept_unit)).sum()
        loss = loss + settings.kl_loss_coef * kl
    if settings.teacher_kl_coef:
        distance, tail = _teacher_kl(micro, output, keep, kept_unit, settings)
        more["teacher_kl"], more["tail_mass"] = _total(distance.detach()), _total(tail)
        more["distilled"] = keep.sum()
        if weights is not None and settings.weights_teacher:
            distance = distance * weights
        loss = loss + settings.teacher_kl_coef * (c * distance).sum()
    if normalizers.expert_shares is not None:
        assert output.routing is not None
        balance = balance_loss(output.routing, normalizers.expert_shares, normalizers.routed_tokens)
        loss = loss + settings.router_aux_loss_coef * balance
        more["router_aux_loss"] = balance.detach().double()
    # Responses that the correction did not detect: in decoupled mode it does not read π_θ.
    nonfinite = unit.any(~output.log_probs.detach().isfinite()) & ~correction.nonfinite
    sums = {
        "loss": loss.detach(),
        "pg_loss": pg_loss.detach(),
        "kl_loss": kl.detach(),
        "nonfinite": nonfinite.sum(),
        "tokens": keep.new_tensor(len(keep), dtype=torch.float64),
        "clipped": _count(policy.clipped, loss),
        "clipped_lower": _count(policy.clipped_lower, loss),
        "entropy": _total(output.entropy.detach()),
        "ppo_kl": _total((micro.old_log_probs - output.log_probs).detach()),
    }
    return loss, {name: value.double() for name, value in (sums | more).items()}


def _teacher_kl(
    micro: TokenBatch, output: PolicyOutput, keep: Tensor, kept_unit: Segments, settings: UpdateSettings
) -> tuple[Tensor, Tensor]:
    """Of each kept token (m,): KL(π_θ ‖ teacher), with gradient; π_θ of the tokens that are not listed, 0.0
    without lists."""
    log_probs, teacher = output.log_probs[keep], micro.teacher_log_probs
    assert teacher is not None
    if settings.teacher_kl_type is not None:
        given = teacher[keep], micro.rollout_log_probs[keep], kept_unit
        return kl_loss(settings.teacher_kl_type, log_probs, *given), torch.zeros_like(log_probs)
    assert micro.teacher_top_k is not None
    assert micro.teacher_tail is not None
    assert output.most_likely is not None
    _, listed = micro.teacher_top_k[keep].padded()
    own = output.most_likely[keep]
    found = top_k_kl(own, torch.cat([listed, micro.teacher_tail[keep, None]], 1))
    return found, own[:, -1].detach().exp()


def _expected_scores(
    micro: TokenBatch, output: PolicyOutput, keep: Tensor, settings: UpdateSettings
) -> tuple[Tensor, Tensor]:
    """`expected_score` at each kept token, and the probability of the tokens that the sampler listed (M,).

    Raises:
        RunFailure: the rollout engine listed no tokens.
    """
    if micro.most_likely is None or output.most_likely is None:
        key = "algorithm.rollout_correction.score_centering"
        what, fix = "the rollout engine did not list the most likely tokens", "set rollout.name: hf or vllm"
        raise RunFailure(what, where=key, fix=fix)
    _, rollout_log_probs = micro.most_likely.padded()
    expected = expected_score(output.most_likely[keep], rollout_log_probs[keep], settings.rules.weight)
    return expected, rollout_log_probs.exp().sum(-1)


def _total(values: Tensor) -> Tensor:
    """() float64: the sum of the finite values."""
    return torch.where(values.isfinite(), values, 0.0).sum().double()


def _count(flags: Tensor | None, like: Tensor) -> Tensor:
    """() float64: the number of True values; 0 for None."""
    return torch.zeros_like(like, dtype=torch.float64) if flags is None else flags.sum().double()
