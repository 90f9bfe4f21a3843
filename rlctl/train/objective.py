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
from rlctl.errors import known
from rlctl.routing import balance_loss
from rlctl.train.settings import UpdateSettings

#: Sums of one micro-batch for metrics. `loss`, and before their coefficients its terms `pg_loss`, `kl_loss`
#: and `router_aux_loss`. `nonfinite`: responses with NaN or infinite log-probs that the correction
#: did not detect. Over the loss's tokens: `clipped`, `clipped_lower` and `distilled`, their numbers;
#: `teacher_kl`, nats; `tail_mass`, the policy's probability of what is not among the teacher's most likely
#: tokens. Over all tokens: `tokens`, their number; `entropy` and `ppo_kl`, nats; `listed_mass`, the
#: probability of the tokens that the sampler listed.
SUMS = (
    *("loss", "pg_loss", "kl_loss", "router_aux_loss", "nonfinite", "clipped", "clipped_lower"),
    *("teacher_kl", "distilled", "tail_mass", "tokens", "entropy", "ppo_kl", "listed_mass"),
)


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """What the loss needs to know of a whole mini-batch, over all of its micro-batches and ranks.

    Attributes:
        num_tokens, num_responses: counted by the denominators; responses with at least one such token.
        factor: mean weight; weights are divided by it.
        loss: with the statistics that the loss function reads.
        all_tokens: number of tokens, rejected ones included.
        expert_counts: (E,) number of them that go to each expert; None: there is no auxiliary loss.
    """

    num_tokens: float
    num_responses: float
    factor: float
    loss: LossRule
    all_tokens: float
    expert_counts: Tensor | None = None


def actor_loss(
    micro: TokenBatch,
    output: PolicyOutput,
    correction: Correction,
    whole: BatchStatistics,
    settings: UpdateSettings,
) -> tuple[Tensor, Sums]:
    """This micro-batch's share of the mini-batch loss, with gradient, and the sums for `actor/*` metrics.

    Every term is Σ_t c_t · ℓ_t over the kept tokens, with the same coefficients c; rejected tokens are in
    none.
    """
    keep, rules = correction.keep, settings.rules
    unit = rules.segments(micro.units, "sequence")
    counted = keep if rules.loss_denominator == "after_rejection" else torch.ones_like(keep)
    counts, mode = (whole.num_tokens, whole.num_responses), settings.actor.loss_agg_mode
    horizon = settings.spec.data.max_response_length
    c = coefficients(mode, keep, counted, unit, *counts, horizon=horizon)[keep]
    all_old = known(micro.old_log_probs)
    log_probs, old, advantages = (x[keep] for x in (output.log_probs, all_old, known(micro.advantages)))
    kept_unit = unit.kept(keep)
    weights = correction.weights[keep] / whole.factor if settings.weights_are_applied else None
    policy = policy_loss(whole.loss, log_probs, old, advantages, kept_unit, weights)
    loss = pg_loss = (c * policy.values).sum()
    sums = no_sums(keep.device)
    if settings.centers_scores:
        expected, mass = _expected_scores(micro, output, keep, settings)
        loss = pg_loss = pg_loss + (c * advantages * expected).sum() / whole.factor
        sums["listed_mass"] = _total(mass)
    if settings.actor.entropy_coeff:
        loss = loss - settings.actor.entropy_coeff * (c * output.entropy[keep]).sum()
    if settings.kl_loss_type is not None:
        # Relative to π_rollout in both modes, because the tokens were sampled from it.
        policies = (known(micro.ref_log_probs)[keep], micro.rollout_log_probs[keep])
        kl = (c * kl_loss(settings.kl_loss_type, log_probs, *policies, kept_unit)).sum()
        loss = loss + settings.actor.kl_loss_coef * kl
        sums["kl_loss"] = kl.detach()
    if settings.teacher_kl_coef:
        distance, tail = _teacher_kl(micro, output, keep, kept_unit, settings)
        sums |= {"teacher_kl": _total(distance), "tail_mass": _total(tail), "distilled": keep.sum()}
        if weights is not None and settings.weights_teacher:
            distance = distance * weights
        loss = loss + settings.teacher_kl_coef * (c * distance).sum()
    if whole.expert_counts is not None:
        balance = balance_loss(known(output.routing), whole.expert_counts, whole.all_tokens)
        loss = loss + settings.actor.router_aux_loss_coef * balance
        sums["router_aux_loss"] = balance.detach()
    for name, flags in (("clipped", policy.clipped), ("clipped_lower", policy.clipped_lower)):
        if flags is not None:
            sums[name] = flags.sum()
    # Responses that the correction did not detect: in decoupled mode it does not read π_θ.
    nonfinite = unit.any(~output.log_probs.detach().isfinite()) & ~correction.nonfinite
    sums |= {
        "loss": loss.detach(),
        "pg_loss": pg_loss.detach(),
        "nonfinite": nonfinite.sum(),
        "tokens": unit.lengths.sum(),
        "entropy": _total(output.entropy),
        "ppo_kl": _total(all_old - output.log_probs),
    }
    return loss, {name: value.double() for name, value in sums.items()}


def no_sums(device: torch.device) -> Sums:
    """The sums of no micro-batch."""
    return dict.fromkeys(SUMS, torch.zeros((), dtype=torch.float64, device=device))


def _teacher_kl(
    micro: TokenBatch, output: PolicyOutput, keep: Tensor, kept_unit: Segments, settings: UpdateSettings
) -> tuple[Tensor, Tensor]:
    """Of each kept token (m,): KL(π_θ ‖ teacher), with gradient; π_θ of the tokens that are not listed, 0.0
    without lists."""
    log_probs = output.log_probs[keep]
    if settings.teacher_kl_type is not None:
        given = known(micro.teacher_log_probs)[keep], micro.rollout_log_probs[keep], kept_unit
        return kl_loss(settings.teacher_kl_type, log_probs, *given), torch.zeros_like(log_probs)
    _, listed = known(micro.teacher_top_k)[keep].padded()
    own = known(output.most_likely)[keep]
    found = top_k_kl(own, torch.cat([listed, known(micro.teacher_tail)[keep, None]], 1))
    return found, own[:, -1].detach().exp()


def _expected_scores(
    micro: TokenBatch, output: PolicyOutput, keep: Tensor, settings: UpdateSettings
) -> tuple[Tensor, Tensor]:
    """`expected_score` at each kept token, and the probability of the tokens that the sampler listed (M,)."""
    _, rollout_log_probs = known(micro.most_likely).padded()
    own = known(output.most_likely)[keep]
    expected = expected_score(own, rollout_log_probs[keep], settings.rules.weight)
    return expected, rollout_log_probs.exp().sum(-1)


def _total(values: Tensor) -> Tensor:
    """() the sum of the finite values, without gradient."""
    values = values.detach()
    return torch.where(values.isfinite(), values, 0.0).sum()
