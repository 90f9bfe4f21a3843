"""One batch's optimizer steps: correction → loss → backward → step, per mini-batch.

The only fork between the modes is which policy the correction compares with the rollout's:

- decoupled: π_old, known before the first step, so weights and `keep_mask` are fixed for all epochs;
- bypass: π_θ itself, so they are computed anew in every mini-batch.

A mini-batch is one optimizer step however it is cut into micro-batches and ranks. Its counts of
tokens and sequences are known beforehand. Its mean weight and number of survivors depend on π_θ in
bypass mode: with one micro-batch per rank they come from the forward pass that is needed anyway,
with several from one more pass without gradient (`_batch_normalizers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.algos.aggregate import Denominators
from rlctl.algos.correction import correct, normalization_factor
from rlctl.algos.correction_records import Correction, CorrectionSums
from rlctl.algos.metric_sums import MetricSums, ReducedSums
from rlctl.algos.rules import CorrectionRules
from rlctl.algos.statistics import correction_metrics, normalized
from rlctl.batch import TrainBatch
from rlctl.engine.protocol import PolicyOutput, TrainEngine
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure
from rlctl.spec.trainer import GuardrailsSpec
from rlctl.train.micro_batches import in_batch_order, micro_batches
from rlctl.train.objective import BatchNormalizers, actor_loss, nonfinite_rows
from rlctl.train.settings import UpdateSettings
from rlctl.train.update_guard import UpdateDecision, UpdateGuard

if TYPE_CHECKING:
    from rlctl.batch import Rows


@dataclass(frozen=True, slots=True)
class Updated:
    """What the updates on one batch did.

    Attributes:
        metrics: of the whole batch, all ranks.
        num_updates: optimizer steps taken or withheld.
        training_log_probs: (B, T) nats, of the policy ρ was formed with: π_old in decoupled mode, in bypass
            mode π_θ in the last pass over each row.
        weights: (B, T), what the last pass multiplied the loss by: 0 where rejected, 1 where a token is kept
            and no weight is applied.
        keep_mask: (B, T) bool, of the last pass.
        nonfinite: (B,) bool, rows with a NaN or infinite log-prob, of any policy and in any pass.
        decisions: the guardrails', one per optimizer step that was to be taken.
    """

    metrics: dict[str, float]
    num_updates: int
    training_log_probs: Tensor
    weights: Tensor
    keep_mask: Tensor
    nonfinite: Tensor
    decisions: list[UpdateDecision]


CheckUpdate = Callable[[CorrectionSums[float], CorrectionRules], UpdateDecision]


@dataclass(frozen=True, slots=True)
class _MiniResult:
    correction: CorrectionSums[float]
    stats: ReducedSums
    factor: float
    grad_norm: float
    lr: float
    skipped: bool
    decision: UpdateDecision


def update(
    batch: TrainBatch,
    actor: TrainEngine,
    ranks: Ranks,
    settings: UpdateSettings,
    lr_at: Callable[[int], float],
    first_update: int,
    *,
    guard: UpdateGuard | None = None,
    hold: bool = False,
) -> Updated:
    """Take every optimizer step of one batch.

    Args:
        batch: this rank's rows, mini-batches in order.
        lr_at: learning rate by the number of the optimizer update.
        first_update: number of the first one here.
        guard: checks every step before it is taken.
        hold: measure everything, change nothing (while a critic warms up).

    Raises:
        RunFailure: too many sequences have non-finite log-probs.
    """
    dumped = RolloutDump.like(batch)
    fixed = None
    if not settings.bypass:
        fixed = [_correct(part, part.old_log_probs, settings) for part in batch.split(settings.mini_rows)]
    check_update = (guard or UpdateGuard(GuardrailsSpec(mode="off"))).check_update
    results: list[_MiniResult] = []
    for _ in range(settings.ppo_epochs):
        for place, mini in enumerate(batch.split(settings.mini_rows)):
            fixed_correction = fixed[place] if fixed else None
            dumped_rows = dumped.rows(place * settings.mini_rows, len(mini))
            lr = lr_at(first_update + len(results))
            results.append(
                _mini_batch(
                    mini, actor, ranks, settings, fixed_correction, lr, dumped_rows, check_update, hold=hold
                )
            )
    distinct = results[: len(fixed)] if fixed else results  # fixed corrections repeat with every epoch
    metrics = _metrics(results, distinct, settings)
    # Each sequence once, however often a row is passed.
    [num_nonfinite] = ranks.sum([float(dumped.nonfinite.sum())])
    metrics["rollout_corr/nonfinite_sequences"] = num_nonfinite
    decisions = [] if hold else [result.decision for result in results]
    return Updated(
        metrics,
        len(decisions),
        dumped.log_probs,
        dumped.weights,
        dumped.keep_mask,
        dumped.nonfinite,
        decisions,
    )


def _mini_batch(
    mini: TrainBatch,
    actor: TrainEngine,
    ranks: Ranks,
    settings: UpdateSettings,
    fixed_correction: Correction | None,
    lr: float,
    dumped: RolloutDump,
    check_update: CheckUpdate,
    *,
    hold: bool,
) -> _MiniResult:
    """One optimizer step, or with `hold` all of it but the step."""
    places = micro_batches(mini, settings.micro_rows, settings.micro_tokens, ranks)
    micros = [mini.pick(rows) for rows in places]
    policy = partial(actor.policy, entropy_grad=settings.entropy_coeff > 0)
    first = _first_pass(micros, policy, settings, is_fixed=fixed_correction is not None)
    correction_of_all = fixed_correction
    if correction_of_all is None and first is not None:
        log_probs = in_batch_order([output.log_probs for output in first], places)
        correction_of_all = _correct(mini, log_probs, settings)
    sums = None if correction_of_all is None else ranks.to_host(correction_of_all.sums)
    normalizers = _batch_normalizers(mini, ranks, sums, settings)

    parts: list[CorrectionSums[Tensor]] = []
    stats: list[MetricSums[Tensor]] = []
    for index, (rows, micro) in enumerate(zip(places, micros, strict=True)):
        output = first[0] if first is not None and len(micros) == 1 else policy(micro)
        if correction_of_all is None:
            correction = _correct(micro, output.log_probs.detach(), settings)
            parts.append(correction.sums)
        else:
            correction = _rows_of(correction_of_all, rows)
        loss, stat = actor_loss(micro, output, correction, normalizers, settings)
        actor.backward(loss, last=index == len(micros) - 1)
        stats.append(stat)
        dumped.write(rows, micro, output, correction, settings, normalizers.factor)

    sums = sums or ranks.to_host(CorrectionSums.merged(parts))
    losses = ranks.to_host(MetricSums.merged(stats))
    _refuse_nonfinite(sums, losses, settings)
    skip = hold or sums.kept_tokens == 0 or not math.isfinite(losses.sums["loss"])
    decision = UpdateDecision() if skip else check_update(sums, settings.rules)
    lr *= decision.lr_scale
    result = actor.step(lr=lr, skip=skip or decision.skip)
    factor = normalization_factor(sums, settings.rules)
    logged = normalized(sums, factor, settings.rules)
    skipped = not (result.applied or decision.skip or hold)
    return _MiniResult(logged, losses, factor, result.grad_norm, lr, skipped, decision)


def _first_pass(
    micros: list[TrainBatch],
    policy: Callable[[TrainBatch], PolicyOutput],
    settings: UpdateSettings,
    *,
    is_fixed: bool,
) -> list[PolicyOutput] | None:
    """π_θ's log-probs ahead of the loss, if they must or may as well be known.

    One micro-batch: its only forward pass, with gradient, is used for the loss as well. Several: a
    pass without gradient, only if the loss needs figures of all of them.
    """
    if is_fixed:
        return None
    if len(micros) == 1:
        return [policy(micros[0])]
    if settings.needs_batch_statistics:
        with torch.no_grad():
            return [policy(micro) for micro in micros]
    return None


def _batch_normalizers(
    mini: TrainBatch, ranks: Ranks, sums: CorrectionSums[float] | None, settings: UpdateSettings
) -> BatchNormalizers:
    """Denominators and weight factor of the whole mini-batch."""
    after = settings.rules.loss_denominator == "after_rejection"
    if sums is not None:
        counts = [sums.kept_tokens, sums.kept_sequences] if after else [sums.tokens, sums.sequences]
    else:
        mask = mini.valid_mask
        counts = ranks.sum([float(mask.sum()), float(mask.any(-1).sum())])
    factor = 1.0
    if sums is not None and settings.weights_are_applied:
        factor = normalization_factor(sums, settings.rules)
    return BatchNormalizers(Denominators(*counts), factor)


def _correct(part: TrainBatch, log_probs: Tensor, settings: UpdateSettings) -> Correction:
    return correct(
        log_probs, part.rollout_log_probs, part.valid_mask, settings.rules, advantages=part.advantages
    )


def _rows_of(correction: Correction, rows: Rows) -> Correction:
    """The rows of one micro-batch; the sums stay those of the whole."""
    weights = correction.weights
    return Correction(
        weights=None if weights is None else weights[rows],
        keep_mask=correction.keep_mask[rows],
        nonfinite=correction.nonfinite[rows],
        sums=correction.sums,
    )


def _refuse_nonfinite(sums: CorrectionSums[float], losses: ReducedSums, settings: UpdateSettings) -> None:
    total = sums.sequences
    bad = total - sums.finite_sequences + losses.sums["nonfinite"]
    if bad > settings.max_nonfinite_fraction * total:
        raise RunFailure(
            f"{bad:.0f} of {total:.0f} sequences have NaN or infinite log-probs",
            where="algorithm.rollout_correction.max_nonfinite_fraction",
            fix="lower actor.lr, use engine.dtype=fp32, or resume from an earlier checkpoint",
        )


@dataclass(frozen=True, slots=True)
class RolloutDump:
    """Buffers of what the loss used, (B, T) and for `nonfinite` (B,), for the rollout dump."""

    log_probs: Tensor
    weights: Tensor
    keep_mask: Tensor
    nonfinite: Tensor

    @classmethod
    def like(cls, batch: TrainBatch) -> RolloutDump:
        """Empty buffers for the rows of `batch`."""
        zeros = torch.zeros_like(batch.rollout_log_probs)
        masks = torch.zeros_like(batch.response_mask), torch.zeros_like(batch.sample_mask)
        return cls(zeros, zeros.clone(), *masks)

    def rows(self, start: int, count: int) -> RolloutDump:
        """Some rows, as views."""
        rows = slice(start, start + count)
        return RolloutDump(
            self.log_probs[rows], self.weights[rows], self.keep_mask[rows], self.nonfinite[rows]
        )

    def write(
        self,
        rows: Rows,
        micro: TrainBatch,
        output: PolicyOutput,
        correction: Correction,
        settings: UpdateSettings,
        factor: float,
    ) -> None:
        """Store one micro-batch. A loss that weights are not applied to multiplies what is kept by 1."""
        self.log_probs[rows] = output.log_probs.detach() if settings.bypass else micro.old_log_probs
        weights = correction.weights if settings.weights_are_applied else None
        self.weights[rows] = correction.keep_mask.float() if weights is None else weights / factor
        self.keep_mask[rows] = correction.keep_mask
        self.nonfinite[rows] |= correction.nonfinite | nonfinite_rows(output.log_probs, micro.valid_mask)


def _metrics(
    results: list[_MiniResult], distinct: list[_MiniResult], settings: UpdateSettings
) -> dict[str, float]:
    correction, stats = distinct[0].correction, results[0].stats
    for result in distinct[1:]:
        correction = correction + result.correction
    for result in results[1:]:
        stats = stats + result.stats
    count = len(results)
    metrics = correction_metrics(correction, settings.rules)
    if settings.rules.weight.normalize and settings.rules.weight.level is not None:
        factor = sum(result.factor for result in distinct) / len(distinct)
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
    if settings.kl_loss_type is not None:
        metrics["actor/kl_loss"] = stats.sums["kl_loss"] / count
        metrics["actor/kl_coef"] = settings.kl_loss_coef
    return metrics | {
        "rollout_corr/skipped_updates": float(sum(result.skipped for result in results)),
        "actor/pg_loss": stats.sums["pg_loss"] / count,
        "actor/pg_clipfrac": stats.per("clipped", "tokens"),
        "actor/pg_clipfrac_lower": stats.per("clipped_lower", "tokens"),
        "actor/ppo_kl": stats.per("ppo_kl", "tokens"),
        "actor/entropy": stats.per("entropy", "tokens"),
        "actor/grad_norm": sum(result.grad_norm for result in results) / count,
        "actor/lr": results[-1].lr,
    }
