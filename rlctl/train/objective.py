"""One micro-batch's share of the actor's loss: policy gradient and further terms (`rlctl.train.terms`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.algos.correction import Correction
from rlctl.algos.losses import coefficients, policy_loss
from rlctl.algos.rules import LossRule
from rlctl.algos.segments import Sums
from rlctl.batch import TokenBatch
from rlctl.engine.protocol import PolicyOutput
from rlctl.train.settings import UpdateSettings
from rlctl.train.terms import KeptTokens, Term, total

#: Sums of one micro-batch for metrics, besides those of the terms. `loss`, and `pg_loss`, its policy
#: gradient. `nonfinite`: responses with NaN or infinite log-probs that the correction did not detect.
#: `clipped` and `clipped_lower`: numbers of tokens of the loss. Over all tokens: `tokens`, their number;
#: `entropy` and `ppo_kl`, nats.
SUMS = ("loss", "pg_loss", "nonfinite", "clipped", "clipped_lower", "tokens", "entropy", "log_ppl", "ppo_kl")


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """What the loss needs to know of a whole mini-batch, over all of its micro-batches and ranks.

    Attributes:
        num_tokens, num_responses: counted by the denominators; responses with at least one such token.
        mean_weight: weights are divided by it.
        loss: with the statistics that the loss function reads.
        terms: of the loss, with what they read of the mini-batch.
        num_all_tokens: number of tokens, rejected ones included.
    """

    num_tokens: float
    num_responses: float
    mean_weight: float
    loss: LossRule
    terms: tuple[Term, ...]
    num_all_tokens: float


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
    keep = correction.keep
    rules = settings.rules
    unit = rules.responses(micro.units)
    counted = keep if rules.loss_denominator == "after_rejection" else torch.ones_like(keep)
    counts = (whole.num_tokens, whole.num_responses)
    mode = settings.actor.loss_agg_mode
    horizon = settings.spec.data.max_response_length
    c = coefficients(mode, keep, counted, unit, *counts, horizon=horizon)[keep]
    tokens = KeptTokens(
        batch=micro,
        output=output,
        keep=keep,
        unit=unit.kept(keep),
        coefficients=c,
        log_probs=output.log_probs[keep],
        weights=correction.weights[keep] / whole.mean_weight if settings.weights_are_applied else None,
        mean_weight=whole.mean_weight,
        num_all_tokens=whole.num_all_tokens,
    )
    old = tokens.column("old_log_probs")
    advantages = tokens.column("advantages")
    policy = policy_loss(whole.loss, tokens.log_probs, old, advantages, tokens.unit, tokens.weights)
    loss = pg_loss = tokens.share_of(policy.values)
    # Responses that the correction did not detect: in decoupled mode it does not read π_θ.
    nonfinite = unit.any(~output.log_probs.detach().isfinite()) & ~correction.nonfinite
    sums = no_sums(keep.device, whole.terms) | {
        "nonfinite": nonfinite.sum(),
        "tokens": unit.lengths.sum(),
        "entropy": total(output.entropy),
        "log_ppl": total(-output.log_probs),
        "ppo_kl": total(micro.column("old_log_probs") - output.log_probs),
    }
    for name, flags in (("clipped", policy.clipped), ("clipped_lower", policy.clipped_lower)):
        if flags is not None:
            sums[name] = flags.sum()
    for term in whole.terms:
        share, sums_of_term = term.share(tokens)
        loss = loss + share
        if term.scales_with_weights:
            pg_loss = pg_loss + share
        sums |= sums_of_term
    sums |= {"loss": loss.detach(), "pg_loss": pg_loss.detach()}
    return loss, {name: value.double() for name, value in sums.items()}


def no_sums(device: torch.device, terms: Sequence[Term]) -> Sums:
    """The sums of no micro-batch."""
    names = [*SUMS, *(name for term in terms for name in (*term.shares, *term.counts))]
    return dict.fromkeys(names, torch.zeros((), dtype=torch.float64, device=device))
