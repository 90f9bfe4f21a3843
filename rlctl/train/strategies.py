"""How and when the correction of a mini-batch is computed.

The strategy depends on the policy that the correction compares with the rollout policy, and on the statistics
of the whole mini-batch that the loss needs:

- `KnownCorrection`: the correction of the whole mini-batch is known before the passes with gradient. With
  π_old (decoupled mode) it is computed before the first step and is the same in every epoch. With π_θ (bypass
  mode), the only forward pass of one micro-batch gives the correction, then the loss; several micro-batches
  first go through a pass without gradient. A loss that reads the whole mini-batch uses these passes in
  decoupled mode as well.
- `PerMicroBatch`: π_θ and several micro-batches, each processed separately, if the loss needs only counts
  that are known beforehand, or if the mean weight and the number of kept tokens or sequences only scale the
  loss. Then the gradient is scaled before the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.algos.batch_losses import WholeBatch
from rlctl.algos.correction import correct, normalization_factor
from rlctl.algos.correction_records import Correction, CorrectionSums
from rlctl.algos.losses import Denominators
from rlctl.algos.rules import LossRule
from rlctl.batch import TrainBatch
from rlctl.engine.protocol import PolicyOutput, TrainEngine
from rlctl.engine.ranks import Ranks
from rlctl.train.micro_batches import in_batch_order, micro_batches
from rlctl.train.objective import BatchNormalizers, ExpertShares
from rlctl.train.settings import UpdateSettings

if TYPE_CHECKING:
    from rlctl.batch import Rows


#: Rows of a micro-batch, the micro-batch, and the policy's output.
MicroOutput = tuple["Rows", TrainBatch, PolicyOutput]


def correct_part(part: TrainBatch, log_probs: Tensor, settings: UpdateSettings) -> Correction:
    """Corrects the rows of `part` with their log-probs (B, T) under π_old or π_θ."""
    given = (log_probs, part.rollout_log_probs, part.valid_mask, settings.rules)
    return correct(*given, advantages=part.advantages, age=part.age)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The rows of one optimizer step, and their division into micro-batches.

    Attributes:
        batch: all rows of this rank.
        row_groups: the rows of each micro-batch.
        num_forward_only: number of leading micro-batches that need no backward pass on any rank.
        actor: the trained policy.
    """

    batch: TrainBatch
    row_groups: list[Rows]
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
        row_groups = micro_batches(
            batch.inputs, settings.micro_rows, settings.micro_tokens, ranks, first=no_gradient
        )
        num_forward_only = 0
        if no_gradient is not None and len(row_groups) > 1:
            # The step needs the backward pass of the last micro-batch.
            forward_only = torch.stack([no_gradient[rows].all() for rows in row_groups[:-1]])
            num_forward_only = -int(ranks.max(-[*forward_only.tolist(), False].index(False)))
        return cls(batch, row_groups, num_forward_only, actor, ranks, settings)

    def policy(self, micro: TrainBatch) -> PolicyOutput:
        """The policy's output for one micro-batch."""
        settings = self.settings
        asked = {"routing": True} if settings.router_aux_loss_coef else {}
        return self.actor.policy(
            micro.inputs, entropy_grad=settings.entropy_coeff > 0, sketch=settings.measure_grad_error, **asked
        )

    def outputs(self) -> Iterator[MicroOutput]:
        """Yields the output of each micro-batch, with gradient if needed."""
        for place, (rows, micro) in enumerate(self.micros()):
            with torch.set_grad_enabled(place >= self.num_forward_only):
                output = self.policy(micro)
            yield rows, micro, output

    def micros(self) -> Iterator[tuple[Rows, TrainBatch]]:
        """The rows of each micro-batch, and the micro-batch."""
        return ((rows, self.batch.pick(rows)) for rows in self.row_groups)

    def log_probs(self, outputs: Sequence[PolicyOutput]) -> Tensor:
        """(B, T) log-probs of all rows under π_θ, without gradient."""
        return in_batch_order([output.log_probs for output in outputs], self.row_groups)

    def expert_shares(self, outputs: Sequence[PolicyOutput]) -> ExpertShares | None:
        """Routing over all micro-batches and ranks; None without an auxiliary loss."""
        if not self.settings.router_aux_loss_coef:
            return None
        parts = []
        for (_, micro), output in zip(self.micros(), outputs, strict=True):
            assert output.routing is not None
            parts.append(output.routing.detach()[micro.valid_mask[micro.response_mask]])
        routing = torch.cat(parts)
        chosen = routing[:, routing.shape[1] // 2 :].double().sum(0)
        *counts, num_tokens = self.ranks.sum([*chosen.tolist(), float(len(routing))])
        return ExpertShares(torch.tensor(counts, device=routing.device) / max(num_tokens, 1.0), num_tokens)

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


class KnownCorrection:
    """The correction of the whole mini-batch is known before the passes with gradient.

    Args:
        outputs: of all micro-batches, if they are known; None: computed by `passes`.

    Attributes:
        normalizers: denominators and weight factor of the whole mini-batch.
    """

    def __init__(
        self,
        mini: MiniBatch,
        correction: Correction,
        loss: LossRule,
        outputs: list[MicroOutput] | None = None,
        experts: ExpertShares | None = None,
    ) -> None:
        self._mini, self._correction, self._outputs = mini, correction, outputs
        settings = mini.settings
        sums: CorrectionSums[float] = mini.ranks.to_host(correction.sums)
        self._sums = sums
        after = settings.rules.loss_denominator == "after_rejection"
        counts = (sums.kept_tokens, sums.kept_sequences) if after else (sums.tokens, sums.sequences)
        factor = normalization_factor(sums, settings.rules) if settings.weights_are_applied else 1.0
        self.normalizers = BatchNormalizers(Denominators(*counts), factor, loss, experts)

    def passes(self) -> Iterator[Pass]:
        """Yields one forward pass per micro-batch, computed lazily, with gradient if needed."""
        whole = self._correction
        for rows, micro, output in self._outputs or self._mini.outputs():
            weights = None if whole.weights is None else whole.weights[rows]
            part = replace(
                whole,
                weights=weights,
                keep_mask=whole.keep_mask[rows],
                nonfinite=whole.nonfinite[rows],
                saturated=whole.saturated[rows],
            )
            yield Pass(rows, micro, output, part)

    def sums(self) -> CorrectionSums[float]:
        """The correction's sums over all ranks; called after all passes."""
        return self._sums

    def scale(self, sums: CorrectionSums[float]) -> float:
        """Factor to apply to the accumulated loss and its gradient; called after all passes."""
        return 1.0


class PerMicroBatch:
    """Each micro-batch is corrected from its own forward pass; methods as in `KnownCorrection`.

    Afterwards, statistics of the whole mini-batch scale the gradient.
    """

    def __init__(self, mini: MiniBatch) -> None:
        self._mini = mini
        self._parts: list[CorrectionSums[Tensor]] = []
        mask = mini.batch.valid_mask
        counts = mini.ranks.sum([float(mask.sum()), float(mask.any(-1).sum())])
        self.normalizers = BatchNormalizers(Denominators(*counts), factor=1.0, loss=mini.settings.loss)

    def passes(self) -> Iterator[Pass]:
        """Yields one forward pass per micro-batch."""
        for rows, micro, output in self._mini.outputs():
            correction = correct_part(micro, output.log_probs.detach(), self._mini.settings)
            self._parts.append(correction.sums)
            yield Pass(rows, micro, output, correction)

    def sums(self) -> CorrectionSums[float]:
        """The correction's sums over all ranks."""
        sums: CorrectionSums[float] = self._mini.ranks.to_host(CorrectionSums.merged(self._parts))
        return sums

    def scale(self, sums: CorrectionSums[float]) -> float:
        """1 if the loss needs only the counts that were known."""
        rules, before = self._mini.settings.rules, self.normalizers.denominators
        factor = normalization_factor(sums, rules) if self._mini.settings.weights_are_applied else 1.0
        if rules.loss_denominator == "before_rejection":
            return 1.0 / factor
        if self._mini.settings.agg_mode == "token-mean":
            return before.num_tokens / max(sums.kept_tokens, 1.0) / factor
        return before.num_sequences / max(sums.kept_sequences, 1.0) / factor


Strategy = KnownCorrection | PerMicroBatch


def strategy_of(mini: MiniBatch, fixed: Correction | None) -> Strategy:
    """The cheapest strategy that provides what the loss needs; the same on every rank.

    Args:
        fixed: its correction with π_old in decoupled mode; None in bypass mode.
    """
    settings = mini.settings
    if fixed is not None and not settings.reads_batch:
        return KnownCorrection(mini, fixed, settings.loss)
    if len(mini.row_groups) == 1:
        outputs = list(mini.outputs())
        found = [output for *_, output in outputs]
    else:
        scales = mini.actor.scales_gradients and settings.scales_with_statistics
        if scales or not settings.needs_batch_statistics:
            return PerMicroBatch(mini)
        outputs = None
        with torch.no_grad():
            found = [mini.policy(micro) for _, micro in mini.micros()]
    log_probs = mini.log_probs(found)
    correction = fixed or correct_part(mini.batch, log_probs, settings)
    loss, experts = mini.loss_rule(log_probs, correction), mini.expert_shares(found)
    return KnownCorrection(mini, correction, loss, outputs, experts)
