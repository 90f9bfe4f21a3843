"""The optimizer steps on one batch: correction → loss → backward → step, per mini-batch.

A mini-batch is one optimizer step, however it is divided into micro-batches and among ranks. There is one
fork. The correction compares π_rollout with π_old, known before the updates (decoupled mode), or with π_θ
(bypass mode), known after a forward pass; and a loss may need statistics of the whole mini-batch, such as the
mean weight. Where such statistics only scale the loss, each micro-batch is corrected from its own pass, and
the accumulated gradient is scaled before the step. Otherwise they are known before the passes with gradient:
from π_old, from the only micro-batch's own pass, or from passes without gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.algos.batch_losses import WholeBatch
from rlctl.algos.correction import (
    Correction,
    correct,
    correction_metrics,
    normalization_factor,
    normalized,
    parts_with_nan,
)
from rlctl.algos.rules import LossRule
from rlctl.algos.segments import LARGEST, HostSums, Sums, added, ratio
from rlctl.batch import TokenBatch
from rlctl.engine.layout import idle_inputs
from rlctl.engine.protocol import PolicyOutput, TrainEngine
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure, known
from rlctl.registry import KL_ESTIMATORS, POLICY_LOSSES
from rlctl.spec.run_spec import GuardrailsSpec
from rlctl.train.deal import micro_batches, mini_batches, num_passes
from rlctl.train.guardrails import UpdateDecision, decide_update
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
class SeenTokens:
    """What the loss used, for the rollout dump; columns of the batch's M tokens and E episodes.

    Attributes:
        training_log_probs: (M,) nats, under the policy in the numerator of ρ: π_old in decoupled mode, in
            bypass mode π_θ in the last pass.
        weights: (M,) factors of the loss in the last pass: 0 where rejected, 1 where a token is kept and no
            weight is applied.
        keep: (M,) bool, of the last pass.
        nonfinite: (R,) bool, responses with a NaN or infinite log-prob under any policy, in any pass.
        saturated: (R,) bool, responses with |Σ log ρ| ≥ 20 in any pass.
    """

    training_log_probs: Tensor
    weights: Tensor
    keep: Tensor
    nonfinite: Tensor
    saturated: Tensor

    @classmethod
    def of(cls, batch: TokenBatch, settings: UpdateSettings) -> SeenTokens:
        """Nothing seen yet."""
        zeros = torch.zeros_like(batch.rollout_log_probs)
        none = torch.zeros_like(settings.rules.segments(batch.units, "sequence").lengths, dtype=torch.bool)
        return cls(zeros, zeros.clone(), zeros.bool(), none, none.clone())

    def note(
        self, mini: MiniBatch, part: _Part, correction: Correction, log_probs: Tensor, factor: float
    ) -> None:
        """Notes a micro-batch, its log-probs (m,) under π_θ, and the divisor of its weights.

        A response that was not finite once stays so.
        """
        settings, given = mini.settings, part.batch
        tokens, responses = mini.tokens[part.tokens], mini.responses[part.responses]
        unit = settings.rules.segments(given.units, "sequence")
        weights = correction.weights / factor if settings.weights_are_applied else correction.keep.float()
        self.training_log_probs[tokens] = log_probs if settings.bypass else known(given.old_log_probs)
        self.weights[tokens], self.keep[tokens] = weights, correction.keep
        self.nonfinite[responses] |= correction.nonfinite | unit.any(~log_probs.isfinite())
        self.saturated[responses] |= correction.saturated


@dataclass(frozen=True, slots=True)
class _MiniResult:
    correction: HostSums
    losses: HostSums
    factor: float
    grad_norm: float
    lr: float
    applied: bool
    missed: str  # why it could not be made, see `Updated`; "": it was made, or withheld
    decision: UpdateDecision | None


@dataclass(frozen=True, slots=True)
class _Part:
    """A micro-batch, and the indices of its tokens and responses in its mini-batch."""

    batch: TokenBatch
    tokens: Tensor
    responses: Tensor


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The episodes of one optimizer step on this rank, and their division into forward passes.

    Attributes:
        tokens, responses: their indices in the batch of all mini-batches.
        num_passes: forward passes of every rank: under ZeRO they are collectives. A rank with fewer parts
            makes idle ones.
        num_forward_only: number of leading passes that need no backward pass on any rank.
        layout: how the model reads the passes, in words.
    """

    batch: TokenBatch
    tokens: Tensor
    responses: Tensor
    parts: list[_Part]
    num_passes: int
    num_forward_only: int
    layout: str
    actor: TrainEngine
    ranks: Ranks
    settings: UpdateSettings

    @classmethod
    def of(
        cls, whole: TokenBatch, chosen: Tensor, actor: TrainEngine, ranks: Ranks, settings: UpdateSettings
    ) -> MiniBatch:
        """Divides the chosen episodes (k,) of `whole` into micro-batches (all ranks call this)."""
        batch, no_gradient = whole.pick(chosen), None
        if settings.vanishes_without_advantage and batch.advantages is not None:
            no_gradient = ~batch.units.episode.any(batch.advantages != 0.0)
        sizes = settings.actor.ppo_micro_batch_size_per_gpu, settings.spec.pass_tokens
        cuts = micro_batches(batch, *sizes, first=no_gradient)
        parts = [_Part(batch.pick(episodes), *_indices(batch, episodes, settings)) for episodes in cuts]
        count, forward_only = num_passes(len(parts), ranks), 0
        if no_gradient is not None and count > 1:
            needed = [place for place, episodes in enumerate(cuts) if not no_gradient[episodes].all()]
            last = count - 1  # the step needs the backward pass of the last one
            forward_only = int(ranks.min(float(min([*needed, last]))))
        idle = idle_inputs(batch.token_ids.device)
        layout = actor.plan([part.batch.inputs for part in parts] or [idle])
        indices = _indices(whole, chosen, settings)
        return cls(batch, *indices, parts, count, forward_only, layout, actor, ranks, settings)

    def outputs(self) -> Iterator[tuple[_Part | None, PolicyOutput]]:
        """Yields each micro-batch, None for an idle pass, and its output, with gradient if needed."""
        settings, idle = self.settings, idle_inputs(self.batch.token_ids.device)
        asked = {"routing": True} if settings.actor.router_aux_loss_coef else {}
        asked |= {"tail": True} if settings.spec.lists_teacher else {}
        for place in range(self.num_passes):
            part = self.parts[place] if place < len(self.parts) else None
            inputs = part.batch.inputs if part else idle
            with torch.set_grad_enabled(torch.is_grad_enabled() and place >= self.num_forward_only):
                output = self.actor.policy(inputs, entropy_grad=settings.actor.entropy_coeff > 0, **asked)
            yield part, output

    def joined(self, outputs: list[tuple[_Part | None, PolicyOutput]], name: str) -> Tensor:
        """A field (m, …) of all outputs as (M, …), in the order of the batch, detached."""
        like: Tensor = getattr(outputs[0][1], name).detach()
        whole = like.new_empty((len(self.batch.turns), *like.shape[1:]))
        for part, output in outputs:
            if part:
                whole[part.tokens] = getattr(output, name).detach()
        return whole

    def correct(self, batch: TokenBatch, log_probs: Tensor) -> Correction:
        """Corrects the tokens of `batch` with their log-probs (m,) under π_old or π_θ."""
        given = (log_probs, batch.rollout_log_probs, batch.units, self.settings.rules)
        return correct(*given, advantages=batch.advantages, age=batch.age)


def _indices(batch: TokenBatch, episodes: Tensor, settings: UpdateSettings) -> tuple[Tensor, Tensor]:
    """Indices of the tokens and responses of some episodes of a batch."""
    by_episode = settings.rules.unit == "episode"
    responses = episodes if by_episode else batch.sequences_of_episodes.entries_of(episodes)
    return batch.units.episode.entries_of(episodes), responses


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What is known of a mini-batch before its passes with gradient; the same way on every rank.

    Attributes:
        statistics: what the loss needs of the whole mini-batch.
        correction: of all of its tokens; None: each micro-batch is corrected from its own pass.
        sums: those of the correction, over all ranks.
        outputs: of all micro-batches; None: not computed yet.
    """

    statistics: BatchStatistics
    correction: Correction | None = None
    sums: HostSums | None = None
    outputs: list[tuple[_Part | None, PolicyOutput]] | None = None


def _prepared(mini: MiniBatch, fixed: Correction | None) -> _Prepared:
    """The cheapest way to the correction and the statistics that the loss needs.

    Args:
        fixed: the correction with π_old in decoupled mode; None in bypass mode.
    """
    settings, ranks, batch = mini.settings, mini.ranks, mini.batch
    scales = mini.actor.scales_gradients and settings.statistics_only_scale
    if fixed is None and mini.num_passes > 1 and (scales or not settings.needs_statistics):
        # Each micro-batch is corrected from its own pass; the gradient is scaled before the step.
        lengths = settings.rules.segments(batch.units, "sequence").lengths
        tokens, responses = ranks.sum([float(lengths.sum()), float((lengths > 0).sum())])
        return _Prepared(BatchStatistics(tokens, responses, 1.0, settings.loss, tokens))
    outputs, correction, loss, experts = None, fixed, settings.loss, None
    if fixed is None or settings.needs_policy_statistics:
        # From π_θ: with gradient only if no further pass is needed.
        with torch.set_grad_enabled(mini.num_passes == 1):
            found = list(mini.outputs())
        outputs = found if mini.num_passes == 1 else None
        log_probs = mini.joined(found, "log_probs")
        correction = fixed or mini.correct(batch, log_probs)
        if settings.loss.needs_statistics:
            loss = _with_statistics(mini, log_probs, correction.keep)
        if settings.actor.router_aux_loss_coef:
            routing = mini.joined(found, "routing")
            own = routing[:, routing.shape[1] // 2 :].double().sum(0)
            experts = torch.tensor(ranks.sum(own.tolist()), device=own.device)
    sums = ranks.all_reduce(known(correction).sums)
    whole = BatchStatistics(*_divisors(sums, settings), loss, sums["tokens"], experts)
    return _Prepared(whole, correction, sums, outputs)


def _divisors(sums: HostSums, settings: UpdateSettings) -> tuple[float, float, float]:
    """Numbers of tokens and responses that the denominators count, and the mean weight."""
    which = "kept_" if settings.rules.loss_denominator == "after_rejection" else ""
    factor = normalization_factor(sums, settings.rules) if settings.weights_are_applied else 1.0
    return sums[f"{which}tokens"], sums[f"{which}sequences"], factor


def _with_statistics(mini: MiniBatch, log_probs: Tensor, keep: Tensor) -> LossRule:
    """The loss with the statistics that it reads of the kept tokens of the mini-batch, over all ranks."""
    batch, ranks, settings = mini.batch, mini.ranks, mini.settings
    policies = (log_probs[keep], known(batch.old_log_probs)[keep], known(batch.advantages)[keep])
    unit = settings.rules.segments(batch.units, "sequence").kept(keep)
    return WholeBatch(*policies, unit, ranks.sum, ranks.all_gather).with_statistics(settings.loss)


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
            result = _step(mini, fixed.get(number), seen, lr, guard, lr_scale, hold=hold)
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
) -> _MiniResult:
    """One optimizer step; with `hold`, everything except the step itself. Notes in `seen` what it used."""
    settings, prepared = mini.settings, _prepared(mini, fixed)
    statistics = prepared.statistics
    losses = [no_sums(mini.batch.token_ids.device)]
    corrections: list[Sums] = []
    for done, (part, output) in enumerate(prepared.outputs or mini.outputs(), start=1):
        if part is None:
            loss = 0.0 * (output.log_probs.sum() + output.entropy.sum())
        else:
            log_probs = output.log_probs.detach()
            if prepared.correction is None:
                correction = mini.correct(part.batch, log_probs)
                corrections.append(correction.sums)
            else:
                correction = prepared.correction.of(part.tokens, part.responses)
            loss, sums_of_part = actor_loss(part.batch, output, correction, statistics, settings)
            losses.append(sums_of_part)
            seen.note(mini, part, correction, log_probs, statistics.factor)
        if loss.requires_grad:
            mini.actor.backward(loss, last=done == mini.num_passes)

    sums, scale = prepared.sums, 1.0
    if sums is None:  # without episodes, this rank has the sums of an empty batch
        own = corrections or [mini.correct(mini.batch, mini.batch.rollout_log_probs).sums]
        sums = mini.ranks.all_reduce(added(own))
        scale = _scale(sums, statistics, settings)
        seen.weights[mini.tokens] /= _divisors(sums, settings)[-1]
    factor = normalization_factor(sums, settings.rules)
    loss_sums = mini.ranks.all_reduce(added(losses))
    loss_sums |= {name: loss_sums[name] * scale for name in ("loss", "pg_loss", "kl_loss")}
    _refuse_nonfinite(sums, loss_sums, settings)
    missed = "" if math.isfinite(loss_sums["loss"]) else "nonfinite"
    if not sums["kept_tokens"]:
        missed = "rejected" if sums["tokens"] else "empty"
    decision = None
    if not missed and not hold and guard.mode != "off":
        decision = decide_update(sums, settings.rules, lr_scale, guard)
    lr *= decision.lr_scale if decision else 1.0
    if settings.actor.lr_ess_scaling:  # Huang et al. 2026, VCPO, arXiv 2602.17616: lr × √ESS
        name = "rollout_is_raw_eff_sample_size"
        lr *= math.sqrt(correction_metrics(sums, settings.rules).get(f"rollout_corr/{name}", 0.0))
    is_withheld = hold or (decision is not None and decision.skip)
    result = mini.actor.step(lr=lr, skip=is_withheld or bool(missed), grad_scale=scale)
    return _MiniResult(
        correction=normalized(sums, factor, settings.rules),
        losses=loss_sums,
        factor=factor,
        grad_norm=result.grad_norm,
        lr=lr,
        applied=result.applied,
        missed="" if result.applied or is_withheld else missed or "nonfinite",
        decision=decision,
    )


def _scale(sums: HostSums, assumed: BatchStatistics, settings: UpdateSettings) -> float:
    """Factor of the accumulated loss and its gradient, from statistics that were not known before."""
    tokens, responses, factor = _divisors(sums, settings)
    if settings.actor.loss_agg_mode == "token-mean":
        return assumed.num_tokens / max(tokens, 1.0) / factor
    return assumed.num_responses / max(responses, 1.0) / factor


def _refuse_nonfinite(sums: HostSums, losses: HostSums, settings: UpdateSettings) -> None:
    """Refuses too many responses that are not finite, and parts that return NaN for the other ones."""
    total = sums["sequences"]
    bad = total - sums["finite_sequences"] + losses["nonfinite"]
    if bad > settings.spec.algorithm.rollout_correction.max_nonfinite_fraction * total:
        raise RunFailure(
            f"{bad:.0f} of {total:.0f} sequences have NaN or infinite log-probs",
            where="algorithm.rollout_correction.max_nonfinite_fraction",
            fix="lower actor.lr, use engine.dtype=fp32, or resume from an earlier checkpoint",
        )
    found = parts_with_nan(sums, settings.rules)
    if math.isnan(losses["loss"]) and not losses["nonfinite"]:
        kinds = [(KL_ESTIMATORS, kind) for kind in (settings.kl_loss_type, settings.teacher_kl_type)]
        for registry, name in ((POLICY_LOSSES, settings.loss.name), *kinds):
            if name and registry[name].__module__ in USER_MODULES:
                found.append(f"{registry.kind} {name}")
    if found:
        what, fix = f"{' or '.join(found)} returned NaN", "for example, do not divide by a length of 0"
        raise RunFailure(what, where="algorithm.rollout_correction", fix=fix)


def _metrics(results: list[_MiniResult], settings: UpdateSettings) -> dict[str, float]:
    # Every epoch has the same responses: their mean, so that deviations with n − 1 count each once.
    correction = {
        name: value if name.endswith(LARGEST) else value / settings.actor.ppo_epochs
        for name, value in added([result.correction for result in results]).items()
    }
    losses, count = added([result.losses for result in results]), len(results)
    tokens = losses["tokens"]
    metrics = correction_metrics(correction, settings.rules)
    if settings.rules.weight.normalize and settings.rules.weight.level is not None:
        factor = sum(result.factor for result in results) / count
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
    if settings.centers_scores:
        metrics["rollout_corr/listed_mass"] = ratio(losses["listed_mass"], tokens)
    if settings.actor.router_aux_loss_coef:
        metrics["actor/router_aux_loss"] = losses["router_aux_loss"] / count
    if settings.teacher_kl_coef:
        metrics["distill/kl_loss"] = ratio(losses["teacher_kl"], losses["distilled"])
    if settings.spec.lists_teacher:
        metrics["distill/tail_mass"] = ratio(losses["tail_mass"], losses["distilled"])
    if settings.kl_loss_type is not None:
        metrics["actor/kl_loss"] = losses["kl_loss"] / count
        metrics["actor/kl_coef"] = settings.actor.kl_loss_coef
    return metrics | {
        "rollout_corr/skipped_updates": float(sum(bool(result.missed) for result in results)),
        "actor/pg_loss": losses["pg_loss"] / count,
        "actor/pg_clipfrac": ratio(losses["clipped"], tokens),
        "actor/pg_clipfrac_lower": ratio(losses["clipped_lower"], tokens),
        "actor/ppo_kl": ratio(losses["ppo_kl"], tokens),
        "actor/entropy": ratio(losses["entropy"], tokens),
        "actor/grad_norm": sum(result.grad_norm for result in results) / count,
        "actor/lr": results[-1].lr,
    }
