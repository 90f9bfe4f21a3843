"""The episodes of one optimizer step, their division into micro-batches, and what the loss used of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.algos.correction import Correction, correct
from rlctl.batch import TokenBatch
from rlctl.engine.layout import idle_inputs
from rlctl.engine.protocol import PolicyOutput, TrainEngine
from rlctl.engine.ranks import Ranks
from rlctl.errors import known
from rlctl.train.deal import micro_batches, num_passes
from rlctl.train.settings import UpdateSettings
from rlctl.train.terms import Term, asked_of_policy


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The episodes of one forward pass, and the indices of their tokens and responses in the mini-batch."""

    batch: TokenBatch
    tokens: Tensor
    responses: Tensor


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of the policy.

    Attributes:
        micro: what it read; None: nothing, other ranks have more micro-batches.
    """

    micro: MicroBatch | None
    output: PolicyOutput


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The episodes of one optimizer step on this rank, and their division into forward passes.

    Attributes:
        tokens, responses: their indices in the batch of all mini-batches.
        num_passes: forward passes of every rank: under ZeRO they are collectives. A rank with fewer
            micro-batches makes idle ones.
        num_forward_only: number of leading passes that need no backward pass on any rank.
        layout: how the model read the passes, in words.
    """

    batch: TokenBatch
    tokens: Tensor
    responses: Tensor
    micro_batches: list[MicroBatch]
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
        batch = whole.pick(chosen)
        no_gradient = _without_gradient(batch, settings)
        sizes = settings.actor.ppo_micro_batch_size_per_gpu, settings.spec.pass_tokens
        cuts = micro_batches(batch, *sizes, first=no_gradient)
        micros = [MicroBatch(batch.pick(episodes), *_indices(batch, episodes, settings)) for episodes in cuts]
        count = num_passes(len(cuts), ranks)
        forward_only = 0
        if no_gradient is not None and count > 1:
            forward_only = _num_forward_only(cuts, no_gradient, count, ranks)
        idle = idle_inputs(batch.token_ids.device)
        layout = actor.plan([micro.batch.inputs for micro in micros] or [idle])
        tokens, responses = _indices(whole, chosen, settings)
        return cls(
            batch=batch,
            tokens=tokens,
            responses=responses,
            micro_batches=micros,
            num_passes=count,
            num_forward_only=forward_only,
            layout=layout,
            actor=actor,
            ranks=ranks,
            settings=settings,
        )

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the loss beside the policy gradient."""
        return self.settings.terms

    def passes(self) -> Iterator[Pass]:
        """The policy's forward passes, with gradient where it is enabled and needed."""
        asked = asked_of_policy(self.terms)
        idle = idle_inputs(self.batch.token_ids.device)
        with_gradient = torch.is_grad_enabled()
        for index in range(self.num_passes):
            micro = self.micro_batches[index] if index < len(self.micro_batches) else None
            inputs = micro.batch.inputs if micro else idle
            with torch.set_grad_enabled(with_gradient and index >= self.num_forward_only):
                output = self.actor.policy(inputs, **asked)
            yield Pass(micro, output)

    def joined(self, passes: list[Pass], name: str) -> Tensor:
        """A field (m, …) of all outputs as (M, …), in the order of the batch, detached."""
        like: Tensor = getattr(passes[0].output, name).detach()
        whole = like.new_empty((len(self.batch.turns), *like.shape[1:]))
        for each in passes:
            if each.micro:
                whole[each.micro.tokens] = getattr(each.output, name).detach()
        return whole

    def correct(self, batch: TokenBatch, log_probs: Tensor) -> Correction:
        """Corrects the tokens of `batch` with their log-probs (m,) under π_old or π_θ."""
        return correct(
            log_probs,
            batch.rollout_log_probs,
            batch.units,
            self.settings.rules,
            advantages=batch.advantages,
            age=batch.columns.get("age"),
        )


def _without_gradient(batch: TokenBatch, settings: UpdateSettings) -> Tensor | None:
    """(E,) bool: episodes whose loss has no gradient; None: it is not known of any."""
    if not settings.vanishes_without_advantage or batch.advantages is None:
        return None
    return ~batch.units.episode.any(batch.advantages != 0.0)


def _num_forward_only(cuts: list[Tensor], no_gradient: Tensor, count: int, ranks: Ranks) -> int:
    """Number of leading passes that need no backward pass on any rank, of `count` (all ranks call this)."""
    with_gradient = [index for index, episodes in enumerate(cuts) if not no_gradient[episodes].all()]
    last = count - 1  # the step needs the backward pass of the last one
    return int(ranks.min(float(min([*with_gradient, last]))))


def _indices(batch: TokenBatch, episodes: Tensor, settings: UpdateSettings) -> tuple[Tensor, Tensor]:
    """Indices of the tokens and responses of some episodes of a batch."""
    by_episode = settings.rules.unit == "episode"
    responses = episodes if by_episode else batch.sequences_of_episodes.entries_of(episodes)
    return batch.units.episode.entries_of(episodes), responses


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
        before_updates: (M,) nats, under the policy before the first update on the batch; NaN: not computed.
    """

    training_log_probs: Tensor
    weights: Tensor
    keep: Tensor
    nonfinite: Tensor
    saturated: Tensor
    before_updates: Tensor

    @classmethod
    def of(cls, batch: TokenBatch, settings: UpdateSettings) -> SeenTokens:
        """Nothing seen yet."""
        zeros = torch.zeros_like(batch.rollout_log_probs)
        none = torch.zeros_like(settings.rules.responses(batch.units).lengths, dtype=torch.bool)
        before = torch.full_like(zeros, math.nan) if settings.bypass else known(batch.old_log_probs)
        return cls(
            training_log_probs=zeros,
            weights=zeros.clone(),
            keep=zeros.bool(),
            nonfinite=none,
            saturated=none.clone(),
            before_updates=before,
        )

    def note(
        self, mini: MiniBatch, micro: MicroBatch, correction: Correction, log_probs: Tensor, *, is_first: bool
    ) -> None:
        """Notes a micro-batch, with its log-probs (m,) under π_θ; its weights are not yet normalised.

        A response that was not finite once stays so. `is_first`: there was no update on this batch before.
        """
        settings = mini.settings
        tokens = mini.tokens[micro.tokens]
        responses = mini.responses[micro.responses]
        unit = settings.rules.responses(micro.batch.units)
        if is_first and settings.bypass:
            self.before_updates[tokens] = log_probs
        self.training_log_probs[tokens] = log_probs if settings.bypass else known(micro.batch.old_log_probs)
        self.weights[tokens] = correction.weights if settings.weights_are_applied else correction.keep.float()
        self.keep[tokens] = correction.keep
        self.nonfinite[responses] |= correction.nonfinite | unit.any(~log_probs.isfinite())
        self.saturated[responses] |= correction.saturated

    def normalize(self, mini: MiniBatch, mean_weight: float) -> None:
        """Divides the weights of a mini-batch, all noted, by the mean weight."""
        self.weights[mini.tokens] /= mean_weight
