"""The optimizer steps on one batch: correction → loss → backward → step, per mini-batch.

A mini-batch is one optimizer step, however it is divided into micro-batches and among ranks. How and when its
correction is computed: `rlctl.train.strategies`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import reduce

import torch
from torch import Tensor

from rlctl.algos.correction import normalization_factor
from rlctl.algos.correction_records import CorrectionSums
from rlctl.algos.gradient_error import CANDIDATES
from rlctl.algos.metric_sums import ratio
from rlctl.algos.statistics import correction_metrics, normalized, parts_with_nan
from rlctl.batch import TrainBatch
from rlctl.engine.protocol import TrainEngine
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure
from rlctl.registry import KL_ESTIMATORS, POLICY_LOSSES
from rlctl.spec.run_spec import GuardrailsSpec
from rlctl.train.gradient_error import GradientSketches
from rlctl.train.guardrails import UpdateDecision, decide_update
from rlctl.train.objective import LossSums, actor_loss, nonfinite_rows
from rlctl.train.settings import UpdateSettings
from rlctl.train.strategies import MiniBatch, Pass, Strategy, correct_part, strategy_of
from rlctl.user_code import USER_MODULES


@dataclass(frozen=True, slots=True)
class Updated:
    """Result of the updates on one batch.

    Attributes:
        metrics: of the whole batch, all ranks.
        num_updates: optimizer steps that changed the weights.
        dumped: log-probs, weights and masks of this rank's rows.
        decisions: decisions of the guardrails, one per checked update.
        lr_scale: learning-rate factor with which the guardrails start the next update.
    """

    metrics: dict[str, float]
    num_updates: int
    dumped: RolloutDump
    decisions: list[UpdateDecision]
    lr_scale: float


@dataclass(frozen=True, slots=True)
class _MiniResult:
    correction: CorrectionSums[float]
    losses: LossSums[float]
    factor: float
    grad_norm: float
    lr: float
    applied: bool
    could_not_step: bool
    decision: UpdateDecision | None


def update(
    batch: TrainBatch,
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
        batch: this rank's rows, mini-batches in order.
        lr_at: learning rate by the number of the planned update.
        first_update: number of planned updates before this batch.
        guard: settings of the checks before every step; None: no checks.
        lr_scale: the guardrails' learning-rate factor for the first update.
        hold: compute all metrics, but take no step (while a critic warms up).

    Raises:
        RunFailure: too many sequences have non-finite log-probs.
    """
    guard = guard or GuardrailsSpec(mode="off")
    dumped = RolloutDump.like(batch)
    parts = batch.split(settings.mini_rows)
    fixed = [] if settings.bypass else [correct_part(part, part.old_log_probs, settings) for part in parts]
    results: list[_MiniResult] = []
    candidates = CANDIDATES if settings.auto else {}
    sketches = GradientSketches(candidates=candidates) if settings.measure_grad_error else None
    for epoch in range(settings.ppo_epochs):
        for place, part in enumerate(parts):
            mini = MiniBatch.of(part, actor, ranks, settings)
            strategy = strategy_of(mini, fixed[place] if fixed else None)
            dumped_rows = dumped.rows(place * settings.mini_rows, len(part))
            lr = lr_at(first_update + len(results))
            seen = sketches if epoch == 0 else None
            result = _step(mini, strategy, lr, dumped_rows, guard, lr_scale, hold=hold, sketches=seen)
            lr_scale = lr_scale if result.decision is None else result.decision.next_scale
            results.append(result)
    metrics = _metrics(results, settings)
    if sketches is not None:
        steps = max(len(results) // settings.ppo_epochs, 1)
        [num_groups] = ranks.sum([float(len(sketches.used))])
        metrics |= sketches.metrics(ranks, num_groups / steps)
    # Each sequence is counted once, although every epoch trains on it.
    counts = ranks.sum([float(dumped.nonfinite.sum()), float(dumped.saturated.sum())])
    metrics["rollout_corr/nonfinite_sequences"], metrics["rollout_corr/saturated_sequences"] = counts
    return Updated(
        metrics=metrics,
        num_updates=sum(result.applied for result in results),
        dumped=dumped,
        decisions=[result.decision for result in results if result.decision is not None],
        lr_scale=lr_scale,
    )


def _step(
    mini: MiniBatch,
    strategy: Strategy,
    lr: float,
    dumped: RolloutDump,
    guard: GuardrailsSpec,
    lr_scale: float,
    *,
    hold: bool,
    sketches: GradientSketches | None,
) -> _MiniResult:
    """One optimizer step; with `hold`, everything except the step itself."""
    settings, normalizers = mini.settings, strategy.normalizers
    parts: list[LossSums[Tensor]] = []
    for done in strategy.passes():
        loss, part = actor_loss(done.micro, done.output, done.correction, normalizers, settings)
        parts.append(part)
        if sketches is not None:
            sketches.add(done.micro, done.output, loss)
        if loss.requires_grad:
            mini.actor.backward(loss, last=len(parts) == len(mini.row_groups))
        dumped.write(done, settings, normalizers.factor)

    sums = strategy.sums()
    scale, factor = strategy.scale(sums), normalization_factor(sums, settings.rules)
    losses: LossSums[float] = mini.ranks.to_host(LossSums.merged(parts)).scaled(scale)
    dumped.divide(factor / normalizers.factor, settings)
    _refuse_nonfinite(sums, losses, settings)
    is_possible = sums.kept_tokens > 0 and math.isfinite(losses.loss)
    decision = None
    if is_possible and not hold and guard.mode != "off":
        decision = decide_update(sums, settings.rules, lr_scale, guard)
    lr *= settings.auto_lr_scale * (decision.lr_scale if decision else 1.0)
    if settings.lr_ess_scaling:  # Huang et al. 2026, VCPO, arXiv 2602.17616: lr × √ESS
        raw = sums.raw.token if settings.rules.weight.by_token else sums.raw.sequence
        lr *= math.sqrt(raw.ess)
    is_withheld = hold or (decision is not None and decision.skip)
    result = mini.actor.step(lr=lr, skip=is_withheld or not is_possible, grad_scale=scale)
    return _MiniResult(
        correction=normalized(sums, factor, settings.rules),
        losses=losses,
        factor=factor,
        grad_norm=result.grad_norm,
        lr=lr,
        applied=result.applied,
        could_not_step=not (result.applied or is_withheld),
        decision=decision,
    )


def _refuse_nonfinite(sums: CorrectionSums[float], losses: LossSums[float], settings: UpdateSettings) -> None:
    """Refuses too many sequences that are not finite, and parts that return NaN for the other sequences."""
    total = sums.sequences
    bad = total - sums.finite_sequences + losses.nonfinite
    if bad > settings.max_nonfinite_fraction * total:
        raise RunFailure(
            f"{bad:.0f} of {total:.0f} sequences have NaN or infinite log-probs",
            where="algorithm.rollout_correction.max_nonfinite_fraction",
            fix="lower actor.lr, use engine.dtype=fp32, or resume from an earlier checkpoint",
        )
    found = parts_with_nan(sums, settings.rules)
    if math.isnan(losses.loss) and not losses.nonfinite:
        for registry, name in ((POLICY_LOSSES, settings.loss.name), (KL_ESTIMATORS, settings.kl_loss_type)):
            if name and registry[name].__module__ in USER_MODULES:
                found.append(f"{registry.kind} {name}")
    if found:
        what, fix = f"{' or '.join(found)} returned NaN", "for example, do not divide by a length of 0"
        raise RunFailure(what, where="algorithm.rollout_correction", fix=fix)


@dataclass(frozen=True, slots=True)
class RolloutDump:
    """Values that the loss used, for the rollout dump.

    Attributes:
        training_log_probs: (B, T) nats, under the policy in the numerator of ρ: π_old in decoupled mode, in
            bypass mode π_θ in the last pass over each row.
        weights: (B, T) factors of the loss in the last pass: 0 where rejected, 1 where a token is kept and no
            weight is applied.
        keep_mask: (B, T) bool, of the last pass.
        nonfinite: (B,) bool, rows with a NaN or infinite log-prob under any policy, in any pass.
        saturated: (B,) bool, rows with |Σ log ρ| ≥ 20 in any pass.
    """

    training_log_probs: Tensor
    weights: Tensor
    keep_mask: Tensor
    nonfinite: Tensor
    saturated: Tensor

    @classmethod
    def like(cls, batch: TrainBatch) -> RolloutDump:
        """Empty buffers for the rows of `batch`."""
        zeros = torch.zeros_like(batch.rollout_log_probs)
        none = torch.zeros_like(batch.sample_mask)
        return cls(zeros, zeros.clone(), torch.zeros_like(batch.response_mask), none, none.clone())

    def rows(self, start: int, count: int) -> RolloutDump:
        """`count` rows from `start`, as views."""
        rows = slice(start, start + count)
        return RolloutDump(*(getattr(self, part.name)[rows] for part in fields(self)))

    def divide(self, factor: float, settings: UpdateSettings) -> None:
        """Divides applied weights by a factor that was not known when they were written."""
        if settings.weights_are_applied and factor != 1.0:
            self.weights.div_(factor)

    def write(self, done: Pass, settings: UpdateSettings, factor: float) -> None:
        """Stores one micro-batch; if no weights are applied, kept tokens have weight 1."""
        rows, micro, output, correction = done.rows, done.micro, done.output, done.correction
        self.training_log_probs[rows] = output.log_probs.detach() if settings.bypass else micro.old_log_probs
        weights = correction.weights if settings.weights_are_applied else None
        self.weights[rows] = correction.keep_mask.float() if weights is None else weights / factor
        self.keep_mask[rows] = correction.keep_mask
        self.saturated[rows] |= correction.saturated
        self.nonfinite[rows] |= correction.nonfinite | nonfinite_rows(output.log_probs, micro.valid_mask)


def _metrics(results: list[_MiniResult], settings: UpdateSettings) -> dict[str, float]:
    # Every epoch has the same sequences: their mean, so that deviations with n − 1 count each once.
    correction = reduce(operator.add, (result.correction for result in results)).over(settings.ppo_epochs)
    losses = reduce(operator.add, (result.losses for result in results))
    count = len(results)
    metrics = correction_metrics(correction, settings.rules)
    if settings.rules.weight.normalize and settings.rules.weight.level is not None:
        factor = sum(result.factor for result in results) / count
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
    if losses.listed_mass is not None:
        metrics["rollout_corr/listed_mass"] = ratio(losses.listed_mass, losses.tokens)
    if losses.router_aux_loss is not None:
        metrics["actor/router_aux_loss"] = losses.router_aux_loss / count
    if settings.kl_loss_type is not None:
        metrics["actor/kl_loss"] = losses.kl_loss / count
        metrics["actor/kl_coef"] = settings.kl_loss_coef
    return metrics | {
        "rollout_corr/skipped_updates": float(sum(result.could_not_step for result in results)),
        "actor/pg_loss": losses.pg_loss / count,
        "actor/pg_clipfrac": ratio(losses.clipped, losses.tokens),
        "actor/pg_clipfrac_lower": ratio(losses.clipped_lower, losses.tokens),
        "actor/ppo_kl": ratio(losses.ppo_kl, losses.tokens),
        "actor/entropy": ratio(losses.entropy, losses.tokens),
        "actor/grad_norm": sum(result.grad_norm for result in results) / count,
        "actor/lr": results[-1].lr,
    }
