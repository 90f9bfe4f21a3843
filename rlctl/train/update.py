"""The optimizer steps on one batch: correction → loss → backward → step, per mini-batch.

A mini-batch is one optimizer step, however it is divided into micro-batches and among ranks. The correction
compares π_rollout with π_old, known before the updates (decoupled mode), or with π_θ (bypass mode), known
after a forward pass; and a loss may need statistics of the whole mini-batch, such as the mean weight. So
there are three ways to the gradient (`_gradient`):

- correction and statistics follow from π_old: before the passes (`_with_known_correction`);
- they need π_θ, and only scale the loss: each micro-batch is corrected from its own pass, and the accumulated
  gradient is scaled before the step (`_corrected_pass_by_pass`);
- they need π_θ, and change the loss: from the only pass, or from passes without gradient before those with it
  (`_with_policy_statistics`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlctl.algos.batch_losses import WholeBatch
from rlctl.algos.correction import (
    Correction,
    correction_metrics,
    normalization_factor,
    normalized,
    parts_with_nan,
)
from rlctl.algos.rules import LossRule
from rlctl.algos.segments import LARGEST, HostSums, Sums, added, ratio
from rlctl.batch import TokenBatch
from rlctl.engine.protocol import TrainEngine
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure, known
from rlctl.registry import KL_ESTIMATORS, POLICY_LOSSES
from rlctl.run_spec.run_spec import GuardrailsSpec
from rlctl.train.deal import mini_batches
from rlctl.train.guardrails import UpdateDecision, decide_update
from rlctl.train.mini_batch import MicroBatch, MiniBatch, Pass, SeenTokens
from rlctl.train.objective import BatchStatistics, actor_loss, no_sums
from rlctl.train.settings import UpdateSettings
from rlctl.user_code import USER_MODULES


@dataclass(frozen=True, slots=True)
class Updated:
    """Result of the updates on one batch.

    Attributes:
        metrics: of the whole batch, all ranks.
        num_updates: optimizer steps that changed the weights.
        seen: log-probs, weights and masks of this rank's tokens.
        decisions: decisions of the guardrails, one per checked update.
        missed: reason → number of updates that could not be made: `empty`, without episodes, `rejected` as a
            whole, or `nonfinite`, loss or gradient.
        layout: how the model read the last mini-batch, in words.
    """

    metrics: dict[str, float]
    num_updates: int
    seen: SeenTokens
    decisions: list[UpdateDecision]
    missed: Mapping[str, int]
    layout: str


@dataclass(frozen=True, slots=True)
class _MiniResult:
    correction: HostSums
    losses: HostSums
    mean_weight: float
    grad_norm: float
    lr: float
    applied: bool
    missed: str  # why it could not be made, see `Updated`; "": it was made, or withheld
    decision: UpdateDecision | None


def update(
    batch: TokenBatch,
    actor: TrainEngine,
    ranks: Ranks,
    settings: UpdateSettings,
    lr_at: Callable[[int], float],
    first_update: int,
    *,
    guard: GuardrailsSpec | None = None,
    lr_scale: float = 1.0,
    hold: bool = False,
) -> Updated:
    """Takes all optimizer steps of one batch.

    Args:
        batch: this rank's episodes, with old log-probs and advantages.
        lr_at: learning rate by the number of the planned update.
        first_update: number of planned updates before this batch.
        guard: settings of the checks before every step; None: no checks.
        lr_scale: the guardrails' learning-rate factor for the first update.
        hold: compute all metrics, but take no step (while a critic warms up).

    Raises:
        RunFailure: too many responses have non-finite log-probs.
    """
    guard = guard or GuardrailsSpec(mode="off")
    seen = SeenTokens.of(batch, settings)
    groups = settings.spec.ppo_mini_batch_size
    of_minis = mini_batches(batch, groups, settings.spec.data.train_batch_size // groups)
    results: list[_MiniResult] = []
    fixed: dict[int, Correction] = {}
    for _ in range(settings.actor.ppo_epochs):
        for number, episodes in enumerate(of_minis):
            mini = MiniBatch.of(batch, episodes, actor, ranks, settings)
            if not settings.bypass and number not in fixed:
                fixed[number] = mini.correct(mini.batch, known(mini.batch.old_log_probs))
            lr = lr_at(first_update + len(results))
            result = _step(
                mini, fixed.get(number), seen, lr, guard, lr_scale, hold=hold, is_first=not results
            )
            lr_scale = lr_scale if result.decision is None else result.decision.next_scale
            results.append(result)
    metrics = _metrics(results, settings)
    # Each response is counted once, although every epoch trains on it.
    counts = ranks.sum([float(seen.nonfinite.sum()), float(seen.saturated.sum())])
    metrics["rollout_corr/nonfinite_sequences"], metrics["rollout_corr/saturated_sequences"] = counts
    return Updated(
        metrics=metrics,
        num_updates=sum(result.applied for result in results),
        seen=seen,
        decisions=[result.decision for result in results if result.decision is not None],
        missed=Counter(result.missed for result in results if result.missed),
        layout=mini.layout,
    )


def _step(
    mini: MiniBatch,
    fixed: Correction | None,
    seen: SeenTokens,
    lr: float,
    guard: GuardrailsSpec,
    lr_scale: float,
    *,
    hold: bool,
    is_first: bool,
) -> _MiniResult:
    """One optimizer step; with `hold`, everything except the step itself. Notes in `seen` what it used.

    `is_first`: of the batch.
    """
    settings = mini.settings
    gradient = _gradient(mini, fixed, partial(seen.note, mini, is_first=is_first))
    seen.normalize(mini, gradient.mean_weight)
    sums = gradient.correction
    losses = gradient.losses
    _refuse_nonfinite(sums, losses, mini)
    missed = _reason_for_no_step(sums, losses)
    decision = None
    if not missed and not hold and guard.mode != "off":
        decision = decide_update(sums, settings.rules, lr_scale, guard)
    lr *= decision.lr_scale if decision else 1.0
    if settings.actor.lr_ess_scaling:  # Huang et al. 2026, VCPO, arXiv 2602.17616: lr × √ESS
        name = "rollout_corr/rollout_is_raw_eff_sample_size"
        lr *= math.sqrt(correction_metrics(sums, settings.rules).get(name, 0.0))
    is_withheld = hold or (decision is not None and decision.skip)
    result = mini.actor.step(lr=lr, skip=is_withheld or bool(missed), grad_scale=gradient.scale)
    mean_weight = normalization_factor(sums, settings.rules)
    return _MiniResult(
        correction=normalized(sums, mean_weight, settings.rules),
        losses=losses,
        mean_weight=mean_weight,
        grad_norm=result.grad_norm,
        lr=lr,
        applied=result.applied,
        missed="" if result.applied or is_withheld else missed or "nonfinite",
        decision=decision,
    )


def _reason_for_no_step(sums: HostSums, losses: HostSums) -> str:
    """See `Updated.missed`; "": there is none."""
    if not sums["tokens"]:
        return "empty"
    if not sums["kept_tokens"]:
        return "rejected"
    return "" if math.isfinite(losses["loss"]) else "nonfinite"


# --- three ways to the gradient ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Gradient:
    """What is known once the gradient of a mini-batch is accumulated; the same on every rank.

    Attributes:
        correction: sums of the correction over all ranks.
        losses: sums of the loss over all ranks; its shares are scaled by `scale`.
        mean_weight: divisor of the weights; 1.0 if no weights multiply the loss.
        scale: factor that the accumulated gradient still needs.
    """

    correction: HostSums
    losses: HostSums
    mean_weight: float
    scale: float


#: Notes a micro-batch, its correction and its log-probs under π_θ.
_Note = Callable[..., None]


def _gradient(mini: MiniBatch, fixed: Correction | None, note: _Note) -> _Gradient:
    """Accumulates the gradient of a mini-batch in the cheapest way (all ranks call this).

    Args:
        fixed: the correction with π_old in decoupled mode; None in bypass mode.
    """
    settings = mini.settings
    if fixed is not None and not settings.needs_policy_statistics:
        statistics, sums = _statistics(mini, fixed, settings.loss)
        return _with_known_correction(mini, mini.passes(), fixed, statistics, sums, note)
    can_scale_afterwards = mini.actor.scales_gradients and settings.statistics_only_scale
    if fixed is None and mini.num_passes > 1 and (can_scale_afterwards or not settings.needs_statistics):
        return _corrected_pass_by_pass(mini, note)
    return _with_policy_statistics(mini, fixed, note)


def _with_known_correction(
    mini: MiniBatch,
    passes: Iterable[Pass],
    correction: Correction,
    statistics: BatchStatistics,
    sums: HostSums,
    note: _Note,
) -> _Gradient:
    """From the correction of all tokens of the mini-batch, and its sums over all ranks."""

    def of_micro_batch(micro: MicroBatch, _: Tensor) -> Correction:
        return correction.of(micro.tokens, micro.responses)

    losses = _backward(mini, passes, of_micro_batch, statistics, note)
    return _Gradient(sums, losses, mean_weight=statistics.mean_weight, scale=1.0)


def _with_policy_statistics(mini: MiniBatch, fixed: Correction | None, note: _Note) -> _Gradient:
    """With π_θ of the whole mini-batch: from its only pass, or from passes without gradient before."""
    settings = mini.settings
    is_only_pass = mini.num_passes == 1
    with torch.set_grad_enabled(is_only_pass):
        passes = list(mini.passes())
    joined = partial(mini.joined, passes)
    log_probs = joined("log_probs")
    correction = fixed or mini.correct(mini.batch, log_probs)
    loss = settings.loss
    if loss.needs_statistics:
        loss = _with_loss_statistics(mini, log_probs, correction.keep)
    statistics, sums = _statistics(mini, correction, loss, joined)
    with_gradient = passes if is_only_pass else mini.passes()
    return _with_known_correction(mini, with_gradient, correction, statistics, sums, note)


def _corrected_pass_by_pass(mini: MiniBatch, note: _Note) -> _Gradient:
    """Each micro-batch corrected from its own pass; what was not known scales the gradient afterwards."""
    settings = mini.settings
    batch = mini.batch
    ranks = mini.ranks
    lengths = settings.rules.responses(batch.units).lengths
    num_tokens, num_responses = ranks.sum([float(lengths.sum()), float((lengths > 0).sum())])
    assumed = BatchStatistics(
        num_tokens=num_tokens,
        num_responses=num_responses,
        mean_weight=1.0,
        loss=settings.loss,
        terms=mini.terms,
        num_all_tokens=num_tokens,
    )
    corrections: list[Sums] = []

    def of_micro_batch(micro: MicroBatch, log_probs: Tensor) -> Correction:
        correction = mini.correct(micro.batch, log_probs)
        corrections.append(correction.sums)
        return correction

    losses = _backward(mini, mini.passes(), of_micro_batch, assumed, note)
    if not corrections:  # without episodes, this rank has the sums of an empty batch
        corrections.append(mini.correct(batch, batch.rollout_log_probs).sums)
    sums = ranks.all_reduce(added(corrections))
    tokens, responses, mean_weight = _divisors(sums, settings)
    if settings.actor.loss_agg_mode == "token-mean":
        scale = assumed.num_tokens / max(tokens, 1.0) / mean_weight
    else:
        scale = assumed.num_responses / max(responses, 1.0) / mean_weight
    shares = ["loss", "pg_loss", *(name for term in mini.terms for name in term.shares)]
    losses |= {name: losses[name] * scale for name in shares}
    return _Gradient(sums, losses, mean_weight, scale)


def _backward(
    mini: MiniBatch,
    passes: Iterable[Pass],
    correction_of: Callable[[MicroBatch, Tensor], Correction],
    statistics: BatchStatistics,
    note: _Note,
) -> HostSums:
    """Accumulates the gradient of all passes; sums of their loss over all ranks.

    Args:
        correction_of: a micro-batch and its log-probs (m,) under π_θ → its correction.
    """
    losses = [no_sums(mini.batch.token_ids.device, mini.terms)]
    for number, forward in enumerate(passes, start=1):
        micro = forward.micro
        output = forward.output
        if micro is None:  # this rank has fewer micro-batches than others, which wait for its backward pass
            loss = 0.0 * (output.log_probs.sum() + output.entropy.sum())
        else:
            log_probs = output.log_probs.detach()
            correction = correction_of(micro, log_probs)
            loss, sums = actor_loss(micro.batch, output, correction, statistics, mini.settings)
            losses.append(sums)
            note(micro, correction, log_probs)
        if loss.requires_grad:
            mini.actor.backward(loss, last=number == mini.num_passes)
    return mini.ranks.all_reduce(added(losses))


def _statistics(
    mini: MiniBatch, correction: Correction, loss: LossRule, joined: Callable[[str], Tensor] | None = None
) -> tuple[BatchStatistics, HostSums]:
    """What the loss needs of the whole mini-batch, and the sums of its correction, over all ranks.

    Args:
        joined: field of `PolicyOutput` → its values (M, …), for the terms that read the mini-batch.
    """
    terms = mini.terms
    if joined is not None:
        terms = tuple(
            term.of_mini_batch(joined, mini.ranks) if term.reads_mini_batch else term for term in terms
        )
    sums = mini.ranks.all_reduce(correction.sums)
    tokens, responses, mean_weight = _divisors(sums, mini.settings)
    return BatchStatistics(
        num_tokens=tokens,
        num_responses=responses,
        mean_weight=mean_weight,
        loss=loss,
        terms=terms,
        num_all_tokens=sums["tokens"],
    ), sums


def _divisors(sums: HostSums, settings: UpdateSettings) -> tuple[float, float, float]:
    """Numbers of tokens and responses that the denominators count, and the mean weight."""
    prefix = "kept_" if settings.rules.loss_denominator == "after_rejection" else ""
    mean_weight = normalization_factor(sums, settings.rules) if settings.weights_are_applied else 1.0
    return sums[f"{prefix}tokens"], sums[f"{prefix}sequences"], mean_weight


def _with_loss_statistics(mini: MiniBatch, log_probs: Tensor, keep: Tensor) -> LossRule:
    """The loss with the statistics that it reads of the kept tokens of the mini-batch, over all ranks."""
    batch = mini.batch
    ranks = mini.ranks
    settings = mini.settings
    policies = (log_probs[keep], known(batch.old_log_probs)[keep], known(batch.advantages)[keep])
    unit = settings.rules.responses(batch.units).kept(keep)
    return WholeBatch(*policies, unit, ranks.sum, ranks.all_gather).with_statistics(settings.loss)


# --- checks and metrics -----------------------------------------------------------------------------


def _refuse_nonfinite(sums: HostSums, losses: HostSums, mini: MiniBatch) -> None:
    """Refuses too many responses that are not finite, and parts that return NaN for the other ones."""
    settings = mini.settings
    total = sums["sequences"]
    bad = total - sums["finite_sequences"] + losses["nonfinite"]
    if bad > settings.spec.algorithm.rollout_correction.max_nonfinite_fraction * total:
        raise RunFailure(
            f"{bad:.0f} of {total:.0f} sequences have NaN or infinite log-probs",
            where="algorithm.rollout_correction.max_nonfinite_fraction",
            fix="lower actor.lr, use engine.dtype=fp32, or resume from an earlier checkpoint",
        )
    names = parts_with_nan(sums, settings.rules)
    if math.isnan(losses["loss"]) and not losses["nonfinite"]:
        kinds = [(KL_ESTIMATORS, term.kl_estimator) for term in mini.terms]
        for registry, name in ((POLICY_LOSSES, settings.loss.name), *kinds):
            if name and registry[name].__module__ in USER_MODULES:
                names.append(f"{registry.kind} {name}")
    if names:
        message = f"{' or '.join(names)} returned NaN"
        fix = "for example, do not divide by a length of 0"
        raise RunFailure(message, where="algorithm.rollout_correction", fix=fix)


def _metrics(results: list[_MiniResult], settings: UpdateSettings) -> dict[str, float]:
    # Every epoch has the same responses: their mean, so that deviations with n − 1 count each once.
    correction = {
        name: value if name.endswith(LARGEST) else value / settings.actor.ppo_epochs
        for name, value in added([result.correction for result in results]).items()
    }
    losses = added([result.losses for result in results])
    count = len(results)
    tokens = losses["tokens"]
    metrics = correction_metrics(correction, settings.rules)
    if settings.rules.weight.normalize and settings.rules.weight.level is not None:
        mean_weight = sum(result.mean_weight for result in results) / count
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean_weight
    for term in settings.terms:
        metrics |= term.metrics(losses, count)
    return metrics | {
        "rollout_corr/skipped_updates": float(sum(bool(result.missed) for result in results)),
        "actor/pg_loss": losses["pg_loss"] / count,
        "actor/pg_clipfrac": ratio(losses["clipped"], tokens),
        "actor/pg_clipfrac_lower": ratio(losses["clipped_lower"], tokens),
        "actor/ppo_kl": ratio(losses["ppo_kl"], tokens),
        "actor/entropy": ratio(losses["entropy"], tokens),
        "actor/log_ppl": ratio(losses["log_ppl"], tokens),
        "actor/grad_norm": sum(result.grad_norm for result in results) / count,
        "actor/lr": results[-1].lr,
    }
