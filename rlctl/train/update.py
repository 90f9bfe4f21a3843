"""The optimizer steps on one batch: correction → loss → backward → step, per mini-batch.

A mini-batch is one optimizer step, however it is divided into micro-batches and among ranks. Its strategy
depends on the policy that the correction compares with the rollout policy, and on the statistics of the whole
mini-batch that the loss needs:

- `FixedCorrection`: π_old (decoupled mode). The correction is computed before the first step and is the same
  in every epoch.
- `OnePass`: π_θ (bypass mode), one micro-batch. Its only forward pass gives the correction, then the loss.
- `ScaledPasses`: π_θ, if the mean weight and the number of kept tokens or sequences only scale the loss. Each
  micro-batch is processed separately, and the gradient is scaled before the step.
- `TwoPasses`: π_θ, if they do more than scale the loss. All micro-batches first go through a pass without
  gradient. A loss that reads the whole mini-batch uses `TwoPasses` or `OnePass` in decoupled mode as well.
- `PerMicroBatch`: π_θ, if the loss needs only counts that are known beforehand. Each micro-batch is processed
  separately.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.algos.aggregate import Denominators
from rlctl.algos.auto_correction import CANDIDATES
from rlctl.algos.correction import correct, normalization_factor
from rlctl.algos.correction_records import Correction, CorrectionSums
from rlctl.algos.losses import WholeBatch
from rlctl.algos.metric_sums import MetricSums, ReducedSums
from rlctl.algos.rules import LossRule
from rlctl.algos.statistics import correction_metrics, normalized
from rlctl.batch import TrainBatch
from rlctl.engine.protocol import PolicyOutput, TrainEngine
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure
from rlctl.spec.trainer import GuardrailsSpec
from rlctl.train.gradient_sketches import GradientSketches
from rlctl.train.guardrail_decisions import UpdateDecision, decide_update
from rlctl.train.micro_batches import in_batch_order, micro_batches
from rlctl.train.objective import BatchNormalizers, actor_loss, nonfinite_rows
from rlctl.train.settings import UpdateSettings

if TYPE_CHECKING:
    from rlctl.batch import Rows


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
    stats: ReducedSums
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
    fixed = [] if settings.bypass else [_correct(part, part.old_log_probs, settings) for part in parts]
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
    distinct = results[: len(fixed)] if fixed else results  # fixed corrections repeat with every epoch
    metrics = _metrics(results, distinct, settings)
    if sketches is not None:
        steps = max(len(results) // settings.ppo_epochs, 1)
        [num_groups] = ranks.sum([float(len(sketches.used))])
        metrics |= sketches.metrics(ranks, num_groups / steps)
    # Each sequence counts once, although every epoch passes it.
    [num_nonfinite] = ranks.sum([float(dumped.nonfinite.sum())])
    metrics["rollout_corr/nonfinite_sequences"] = num_nonfinite
    return Updated(
        metrics=metrics,
        num_updates=sum(result.applied for result in results),
        dumped=dumped,
        decisions=[result.decision for result in results if result.decision is not None],
        lr_scale=lr_scale,
    )


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The rows of one optimizer step, and their division into micro-batches.

    Attributes:
        batch: all rows of this rank.
        places: the rows of each micro-batch.
        num_forward_only: number of leading micro-batches that need no backward pass on any rank.
        actor: the trained policy.
    """

    batch: TrainBatch
    places: list[Rows]
    num_forward_only: int
    actor: TrainEngine
    ranks: Ranks
    settings: UpdateSettings

    @classmethod
    def of(cls, batch: TrainBatch, actor: TrainEngine, ranks: Ranks, settings: UpdateSettings) -> MiniBatch:
        """Splits `batch` into micro-batches (all ranks call this)."""
        no_gradient = None
        if settings.needs_advantage:
            no_gradient = ((batch.advantages == 0.0) | ~batch.valid_mask).all(-1)
        places = micro_batches(
            batch.inputs, settings.micro_rows, settings.micro_tokens, ranks, first=no_gradient
        )
        num_forward_only = 0
        if no_gradient is not None and len(places) > 1:  # the step needs the backward pass of the last one
            forward_only = torch.stack([no_gradient[rows].all() for rows in places[:-1]])
            num_forward_only = -int(ranks.max(-[*forward_only.tolist(), False].index(False)))
        return cls(batch, places, num_forward_only, actor, ranks, settings)

    def policy(self, micro: TrainBatch) -> PolicyOutput:
        """The policy's output for one micro-batch."""
        settings = self.settings
        return self.actor.policy(
            micro.inputs, entropy_grad=settings.entropy_coeff > 0, sketch=settings.measure_grad_error
        )

    def outputs(self) -> Iterator[tuple[Rows, TrainBatch, PolicyOutput]]:
        """Yields the rows of each micro-batch, the micro-batch, and its output, with gradient if needed."""
        for place, (rows, micro) in enumerate(self.micros()):
            with torch.set_grad_enabled(place >= self.num_forward_only):
                output = self.policy(micro)
            yield rows, micro, output

    def micros(self) -> Iterator[tuple[Rows, TrainBatch]]:
        """The rows of each micro-batch, and the micro-batch."""
        return ((rows, self.batch.pick(rows)) for rows in self.places)

    def log_probs(self, outputs: Sequence[PolicyOutput]) -> Tensor:
        """(B, T) log-probs of all rows under π_θ, without gradient."""
        return in_batch_order([output.log_probs for output in outputs], self.places)

    def loss_rule(self, log_probs: Tensor, correction: Correction) -> LossRule:
        """The loss with the statistics that it reads of the whole mini-batch, over all ranks."""
        given, ranks = self.batch, self.ranks
        mask = given.valid_mask & correction.keep_mask
        policies = (log_probs, given.old_log_probs, given.advantages)
        return WholeBatch.of(*policies, mask, ranks.sum, ranks.all_gather).with_statistics(self.settings.loss)


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch after the forward pass from which its loss is computed."""

    rows: Rows
    micro: TrainBatch
    output: PolicyOutput
    correction: Correction


class Strategy(ABC):
    """How and when the correction of a mini-batch is computed.

    Attributes:
        normalizers: denominators and weight factor of the whole mini-batch.
    """

    normalizers: BatchNormalizers

    @abstractmethod
    def passes(self) -> Iterator[Pass]:
        """Yields one forward pass per micro-batch, computed lazily, with gradient if needed."""

    @abstractmethod
    def sums(self) -> CorrectionSums[float]:
        """The correction's sums over all ranks; called after all passes."""

    def scale(self, sums: CorrectionSums[float]) -> float:
        """Factor to apply to the accumulated loss and its gradient; called after all passes."""
        return 1.0


class FixedCorrection(Strategy):
    """The correction of the whole mini-batch is known before the passes with gradient."""

    def __init__(self, mini: MiniBatch, correction: Correction, log_probs: Tensor | None = None) -> None:
        self._mini, self._correction = mini, correction
        sums, settings = mini.ranks.to_host(correction.sums), mini.settings
        self._sums = sums
        after = settings.rules.loss_denominator == "after_rejection"
        counts = (sums.kept_tokens, sums.kept_sequences) if after else (sums.tokens, sums.sequences)
        factor = normalization_factor(sums, settings.rules) if settings.weights_are_applied else 1.0
        loss = settings.loss if log_probs is None else mini.loss_rule(log_probs, correction)
        self.normalizers = BatchNormalizers(Denominators(*counts), factor, loss)

    def passes(self) -> Iterator[Pass]:
        """See `Strategy.passes`."""
        whole = self._correction
        for rows, micro, output in self._outputs():
            weights = None if whole.weights is None else whole.weights[rows]
            part = replace(
                whole, weights=weights, keep_mask=whole.keep_mask[rows], nonfinite=whole.nonfinite[rows]
            )
            yield Pass(rows, micro, output, part)

    def _outputs(self) -> Iterator[tuple[Rows, TrainBatch, PolicyOutput]]:
        return self._mini.outputs()

    def sums(self) -> CorrectionSums[float]:
        """See `Strategy.sums`."""
        return self._sums


class OnePass(FixedCorrection):
    """The single forward pass of the only micro-batch gives the correction, then the loss."""

    def __init__(self, mini: MiniBatch, of_old_policy: Correction | None) -> None:
        [self._only] = mini.outputs()
        log_probs = mini.log_probs([self._only[-1]])
        super().__init__(mini, of_old_policy or _correct(mini.batch, log_probs, mini.settings), log_probs)

    def _outputs(self) -> Iterator[tuple[Rows, TrainBatch, PolicyOutput]]:
        return iter([self._only])


class TwoPasses(FixedCorrection):
    """A first pass without gradient over all micro-batches gives the correction."""

    def __init__(self, mini: MiniBatch, of_old_policy: Correction | None) -> None:
        with torch.no_grad():
            log_probs = mini.log_probs([mini.policy(micro) for _, micro in mini.micros()])
        super().__init__(mini, of_old_policy or _correct(mini.batch, log_probs, mini.settings), log_probs)


class PerMicroBatch(Strategy):
    """Each micro-batch is corrected from its own forward pass."""

    def __init__(self, mini: MiniBatch) -> None:
        self._mini = mini
        self._parts: list[CorrectionSums[Tensor]] = []
        mask = mini.batch.valid_mask
        counts = mini.ranks.sum([float(mask.sum()), float(mask.any(-1).sum())])
        self.normalizers = BatchNormalizers(Denominators(*counts), factor=1.0, loss=mini.settings.loss)

    def passes(self) -> Iterator[Pass]:
        """See `Strategy.passes`."""
        for rows, micro, output in self._mini.outputs():
            correction = _correct(micro, output.log_probs.detach(), self._mini.settings)
            self._parts.append(correction.sums)
            yield Pass(rows, micro, output, correction)

    def sums(self) -> CorrectionSums[float]:
        """See `Strategy.sums`."""
        return self._mini.ranks.to_host(CorrectionSums.merged(self._parts))


class ScaledPasses(PerMicroBatch):
    """As `PerMicroBatch`; afterwards, statistics of the whole mini-batch scale the gradient."""

    def scale(self, sums: CorrectionSums[float]) -> float:
        """See `Strategy.scale`."""
        rules, before = self._mini.settings.rules, self.normalizers.denominators
        factor = normalization_factor(sums, rules) if self._mini.settings.weights_are_applied else 1.0
        if rules.loss_denominator == "before_rejection":
            return 1.0 / factor
        if self._mini.settings.agg_mode == "token-mean":
            return before.num_tokens / max(sums.kept_tokens, 1.0) / factor
        return before.num_sequences / max(sums.kept_sequences, 1.0) / factor


def strategy_of(mini: MiniBatch, of_old_policy: Correction | None) -> Strategy:
    """The cheapest strategy that provides what the loss needs; the same on every rank.

    Args:
        mini: the mini-batch.
        of_old_policy: its correction with π_old in decoupled mode; None in bypass mode.
    """
    if of_old_policy is not None and not mini.settings.loss.reads_batch:
        return FixedCorrection(mini, of_old_policy)
    if len(mini.places) == 1:
        return OnePass(mini, of_old_policy)
    if not mini.settings.needs_batch_statistics:
        return PerMicroBatch(mini)
    if mini.actor.scales_gradients and mini.settings.scales_with_statistics:
        return ScaledPasses(mini)
    return TwoPasses(mini, of_old_policy)


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
    stats: list[MetricSums[Tensor]] = []
    for done in strategy.passes():
        loss, stat = actor_loss(done.micro, done.output, done.correction, normalizers, settings)
        stats.append(stat)
        if sketches is not None:
            sketches.add(done.micro, done.output, loss)
        if loss.requires_grad:
            mini.actor.backward(loss, last=len(stats) == len(mini.places))
        dumped.write(done, settings, normalizers.factor)

    sums, losses = strategy.sums(), mini.ranks.to_host(MetricSums.merged(stats))
    scale, factor = strategy.scale(sums), normalization_factor(sums, settings.rules)
    losses = _scaled(losses, scale)
    dumped.divide(factor / normalizers.factor, settings)
    _refuse_nonfinite(sums, losses, settings)
    is_possible = sums.kept_tokens > 0 and math.isfinite(losses.sums["loss"])
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
        stats=losses,
        factor=factor,
        grad_norm=result.grad_norm,
        lr=lr,
        applied=result.applied,
        could_not_step=not (result.applied or is_withheld),
        decision=decision,
    )


def _scaled(losses: ReducedSums, scale: float) -> ReducedSums:
    terms = {name: losses.sums[name] * scale for name in ("loss", "pg_loss", "kl_loss")}
    return replace(losses, sums={**losses.sums, **terms})


def _correct(part: TrainBatch, log_probs: Tensor, settings: UpdateSettings) -> Correction:
    given = (log_probs, part.rollout_log_probs, part.valid_mask, settings.rules)
    return correct(*given, advantages=part.advantages, age=part.age)


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
    """Values that the loss used, for the rollout dump.

    Attributes:
        training_log_probs: (B, T) nats, under the policy in the numerator of ρ: π_old in decoupled mode, in
            bypass mode π_θ in the last pass over each row.
        weights: (B, T) factors of the loss in the last pass: 0 where rejected, 1 where a token is kept and no
            weight is applied.
        keep_mask: (B, T) bool, of the last pass.
        nonfinite: (B,) bool, rows with a NaN or infinite log-prob under any policy, in any pass.
    """

    training_log_probs: Tensor
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
        """`count` rows from `start`, as views."""
        rows = slice(start, start + count)
        return RolloutDump(
            self.training_log_probs[rows], self.weights[rows], self.keep_mask[rows], self.nonfinite[rows]
        )

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
        self.nonfinite[rows] |= correction.nonfinite | nonfinite_rows(output.log_probs, micro.valid_mask)


def _metrics(
    results: list[_MiniResult], distinct: list[_MiniResult], settings: UpdateSettings
) -> dict[str, float]:
    correction = reduce(operator.add, (result.correction for result in distinct))
    stats = reduce(operator.add, (result.stats for result in results))
    count = len(results)
    metrics = correction_metrics(correction, settings.rules)
    if settings.rules.weight.normalize and settings.rules.weight.level is not None:
        factor = sum(result.factor for result in distinct) / len(distinct)
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
    if settings.centers_scores:
        metrics["rollout_corr/listed_mass"] = stats.per("listed_mass", "tokens")
    if settings.kl_loss_type is not None:
        metrics["actor/kl_loss"] = stats.sums["kl_loss"] / count
        metrics["actor/kl_coef"] = settings.kl_loss_coef
    return metrics | {
        "rollout_corr/skipped_updates": float(sum(result.could_not_step for result in results)),
        "actor/pg_loss": stats.sums["pg_loss"] / count,
        "actor/pg_clipfrac": stats.per("clipped", "tokens"),
        "actor/pg_clipfrac_lower": stats.per("clipped_lower", "tokens"),
        "actor/ppo_kl": stats.per("ppo_kl", "tokens"),
        "actor/entropy": stats.per("entropy", "tokens"),
        "actor/grad_norm": sum(result.grad_norm for result in results) / count,
        "actor/lr": results[-1].lr,
    }
