"""On-policy distillation: the reverse KL(π ‖ teacher) of every sampled token, in loss or reward.

What multiplies it: `algorithm.teacher.kl_coef` everywhere; in the loss also the importance weights of the
correction, if the KL is not already exact without them (`SampledKLTerm.share`, `ListedKLTerm.share`); those
weights, divided by their mean, come from `rlctl.train.objective.actor_loss`. In the reward
(`Distillation.rewarded`) it becomes part of the advantage, which the policy gradient weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from rlctl.algos.kl import kl_loss, top_k_kl
from rlctl.algos.segments import ratio
from rlctl.batch import TokenLists
from rlctl.capabilities.teacher.section import PATH, SCORING, lists_tokens
from rlctl.capabilities.teacher.served import ServedTeacher
from rlctl.errors import RunFailure, known
from rlctl.registry import KL_ESTIMATORS
from rlctl.train.capability import Capability
from rlctl.train.score_batch import kl_per_token
from rlctl.train.terms import KeptTokens, Term, total

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.algos.rules import CorrectionRules
    from rlctl.algos.segments import HostSums, Sums
    from rlctl.batch import TokenBatch
    from rlctl.engine.protocol import ListingPolicy
    from rlctl.engine.ranks import Ranks
    from rlctl.run_spec.run_spec import RunSpec
    from rlctl.train.batch_scorer import BatchScorer
    from rlctl.train.model_loader import ModelLoader


@dataclass(frozen=True)
class SampledKLTerm(Term):
    """coefficient · KL(π_θ ‖ teacher) by an estimator that reads the sampled token only."""

    coefficient: float
    estimator: str
    counts: ClassVar[tuple[str, ...]] = ("teacher_kl", "distilled")

    @property
    def kl_estimator(self) -> str:
        """See `Term`."""
        return self.estimator

    def share(self, tokens: KeptTokens) -> tuple[Tensor, Sums]:
        """See `Term.share`.

        The importance weights multiply the KL unless it contains π_θ/π_rollout itself.
        """
        teacher = tokens.column("teacher_log_probs")
        rollout = tokens.column("rollout_log_probs")
        kl = kl_loss(self.estimator, tokens.log_probs, teacher, rollout, tokens.unit)
        has_own_ratio = "rollout_log_probs" in KL_ESTIMATORS.part(self.estimator).needs
        share = tokens.share_of(kl, is_weighted=not has_own_ratio)
        return self.coefficient * share, _sums(kl, tokens)

    def metrics(self, sums: HostSums, num_updates: int) -> dict[str, float]:
        """`distill/kl_loss` in nats per kept token."""
        return {"distill/kl_loss": ratio(sums["teacher_kl"], sums["distilled"])}


@dataclass(frozen=True)
class ListedKLTerm(Term):
    """coefficient · KL(π_θ ‖ teacher) of the teacher's most likely tokens and all others together.

    The KL does not read the sampled token and depends on the policies by the tokens before it only: weights
    of a token would add its own ratio as noise, so only those of longer segments multiply it (`is_weighted`).
    """

    coefficient: float
    is_weighted: bool
    asks: ClassVar[Mapping[str, bool]] = {"tail": True}
    counts: ClassVar[tuple[str, ...]] = ("teacher_kl", "distilled", "tail_mass")

    def share(self, tokens: KeptTokens) -> tuple[Tensor, Sums]:
        """See `Term.share`; `tail_mass`: the policy's probability of what the teacher does not list."""
        _, listed = tokens.lists("most_likely").padded()
        own = tokens.forward("most_likely")
        kl = top_k_kl(own, torch.cat([listed, tokens.column("teacher_tail")[:, None]], 1))
        share = tokens.share_of(kl, is_weighted=self.is_weighted)
        sums = _sums(kl, tokens) | {"tail_mass": total(own[:, -1].detach().exp())}
        return self.coefficient * share, sums

    def metrics(self, sums: HostSums, num_updates: int) -> dict[str, float]:
        """`distill/kl_loss` in nats per kept token, and `distill/tail_mass`."""
        return {
            "distill/kl_loss": ratio(sums["teacher_kl"], sums["distilled"]),
            "distill/tail_mass": ratio(sums["tail_mass"], sums["distilled"]),
        }


def _sums(kl: Tensor, tokens: KeptTokens) -> Sums:
    return {"teacher_kl": total(kl), "distilled": tokens.keep.sum()}


class Distillation(Capability):
    """See the module.

    Attributes:
        model: the teacher.
        vocabulary: number of tokens that it and the policy have in common.
    """

    model: ListingPolicy

    def __init__(self, spec: RunSpec) -> None:
        self._teacher = spec.algorithm.teacher
        self._unit = spec.algorithm.unit
        self._max_length = spec.max_length
        self.vocabulary = 0

    def load(self, loader: ModelLoader) -> None:
        """Loads the teacher, or connects to its server."""
        path = known(self._teacher.path)
        self.vocabulary = len(loader.tokenizer)
        if self._teacher.is_served:
            device = loader.ranks.device
            self.model = ServedTeacher(path, loader.tokenizer, device, max_length=self._max_length)
        else:
            self.model = loader.frozen(path, PATH)

    def scored(self, scorer: BatchScorer, batch: TokenBatch, unrouted: TokenBatch) -> TokenBatch:
        """Adds the teacher's log-probs, and with `ListedKLTerm` its most likely tokens."""
        failure = RunFailure("the teacher gives NaN or infinite log-probs", where=PATH)
        if not lists_tokens(self._teacher):
            own = scorer.score(SCORING, self.model.log_probs, unrouted, failure)
            return batch.with_columns(teacher_log_probs=own)
        count = min(self._teacher.top_k, self.vocabulary)
        score = partial(self.model.top_k, count=count, vocabulary=self.vocabulary)
        figures = scorer.score(SCORING, score, unrouted, failure)
        own, listed, tail, ids = torch.split(figures, [1, count, 1, count], 1)
        counts = torch.full_like(batch.versions, count, dtype=torch.int32)
        return batch.with_columns(
            teacher_log_probs=own.squeeze(1),
            most_likely=TokenLists(counts, ids.int().flatten(), listed.flatten()),
            teacher_tail=tail.squeeze(1),
        )

    def rewarded(self, batch: TokenBatch, ranks: Ranks) -> tuple[TokenBatch, dict[str, float]]:
        """Logs the reverse KL; subtracts it from the rewards, if it is there.

        With `algorithm.teacher.alone` the rewards of the task are 0.
        """
        teacher = self._teacher
        own = batch.column("teacher_log_probs")
        kl, moments_of_kl = kl_per_token(batch, self._unit, "k1", own, ranks)
        if teacher.alone:
            batch = batch.without_rewards()
        if teacher.kl_in == "reward":
            batch = batch.penalised(teacher.kl_coef * kl)
        return batch, {"distill/reverse_kl": moments_of_kl.mean}

    def terms(self, rules: CorrectionRules) -> tuple[Term, ...]:
        """The KL in the loss."""
        teacher = self._teacher
        if lists_tokens(teacher):
            return (ListedKLTerm(teacher.kl_coef, is_weighted=not rules.weight.by_token),)
        if teacher.kl_in == "loss":
            return (SampledKLTerm(teacher.kl_coef, known(teacher.kl_type)),)
        return ()


def capability(spec: RunSpec) -> Capability:
    """The distillation of a spec."""
    return Distillation(spec)
