"""Error of the gradient, from sketched gradients of the groups of a batch; `rollout_correction.auto`.

The gradients are those under the rule in use and under exact sequence weights; with `auto` also those under
each candidate weight. `auto` chooses the weight, the learning rate and fresh responses after every batch. All
its decisions depend only on logged metrics, so a resumed run reads its log and decides as the uninterrupted
run would. The main rank decides for all ranks.

The factor that a rule applies to ∇ log π of a token is −∂loss/∂log π, which autograd computes for any loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.algos.correction import applied_weights, importance_weights, masked_log_ratio, rejection_mask
from rlctl.algos.gradient_error import (
    CANDIDATES,
    AutoChoice,
    CandidateMoments,
    averaged,
    choose,
    gradient_error,
)
from rlctl.algos.row_blocks import Extras, clamped_exp
from rlctl.algos.rules import WeightRule
from rlctl.batch import TrainBatch
from rlctl.engine.protocol import PolicyOutput
from rlctl.engine.ranks import Ranks
from rlctl.train.settings import is_sync_due

if TYPE_CHECKING:
    from rlctl.train.run import Run
    from rlctl.train.settings import UpdateSettings

_DISCARDED = "rollout_corr/auto_discarded"
#: Squared cosine of the expected and the true gradient below which responses sampled ahead are too old.
TOO_OLD = 0.5


@dataclass(slots=True)
class GradientSketches:
    """Accumulates the micro-batches of one pass over a batch.

    Attributes:
        used, exact: group → (K,) sketch of its gradient, for this rank's groups.
        candidates: further weights of `reinforce`, by name.
        of_candidates: for each of them as `used`, up to a common factor.
        weights: Σ W, Σ W² and number of the sequence weights W.
    """

    used: dict[int, Tensor] = field(default_factory=dict)
    exact: dict[int, Tensor] = field(default_factory=dict)
    candidates: Mapping[str, WeightRule] = field(default_factory=dict)
    of_candidates: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    weights: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])

    def add(self, micro: TrainBatch, output: PolicyOutput, loss: Tensor) -> None:
        """Adds one micro-batch, before the backward pass of `loss`, its share of the mini-batch loss."""
        if output.sketch is None or micro.group_ids is None:
            return
        (gradient,) = torch.autograd.grad(loss, output.log_probs, retain_graph=True)
        mask, log_probs = micro.valid_mask, output.log_probs.detach()
        weight = clamped_exp(torch.where(mask, log_probs - micro.rollout_log_probs, 0.0).double().sum(-1))
        counts = mask.any(-1) & weight.isfinite()
        factors = [
            (self.used, -gradient),
            (self.exact, torch.where(mask, micro.advantages * weight[:, None].float(), 0.0)),
        ]
        for name, applied in self._candidate_weights(micro, log_probs):
            factors.append((self.of_candidates.setdefault(name, {}), micro.advantages * applied))
        rows = micro.response_mask.nonzero(as_tuple=True)[0]
        sketch = output.sketch.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)  # of rows that are not finite
        groups, index = torch.unique(micro.group_ids, return_inverse=True)
        for kept, factor in factors:
            tokens = factor.nan_to_num()[micro.response_mask][:, None] * sketch
            sums = torch.zeros(len(groups), tokens.shape[1], device=tokens.device)
            sums.index_add_(0, index[rows], tokens)
            for group, total in zip(groups.tolist(), sums, strict=True):
                kept[group] = kept[group] + total if group in kept else total
        found = weight[counts]
        sums_of = (found.sum(), found.square().sum(), counts.sum())
        self.weights = [a + float(b) for a, b in zip(self.weights, sums_of, strict=True)]

    def _candidate_weights(self, micro: TrainBatch, log_probs: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(B, T) weights of each candidate, 0 in rows that are not finite."""
        if not self.candidates:
            return
        mask = micro.valid_mask
        log_ratio = masked_log_ratio(log_probs, micro.rollout_log_probs, mask, Extras(None, None))
        keep = rejection_mask(log_ratio, [])
        for name, rule in self.candidates.items():
            weights = importance_weights(log_ratio, rule)
            yield name, keep.float() if weights is None else applied_weights(weights, keep)

    def metrics(self, ranks: Ranks, groups_per_step: float) -> dict[str, float]:
        """`rollout_corr/grad_error*` and the candidates' moments, over all ranks (a collective).

        Empty with fewer than two groups.
        """
        kinds = (self.used, self.exact, *(self.of_candidates.get(name, {}) for name in self.candidates))
        own = [tuple(kind[group].cpu() for kind in kinds) for group in sorted(self.used)]
        parts = ranks.exchange(own)
        total, squares, count = ranks.sum(self.weights)
        if len(parts) < 2:
            return {}
        used, exact, *others = (torch.stack(list(each)) for each in zip(*parts, strict=True))
        ess = total**2 / (count * squares) if squares > 0 else 0.0
        found = gradient_error(used, exact, ess, groups_per_step)
        prefix = "rollout_corr/grad_error"
        metrics = {prefix: found.estimate, f"{prefix}_lo": found.low, f"{prefix}_hi": found.high}
        for name, gradients in zip(self.candidates, others, strict=True):
            metrics |= moment_metrics(name, CandidateMoments.of(gradients, exact))
        return metrics


class AutoCorrection:
    """Sets the correction weight of every batch; without `rollout_correction.auto` it does nothing.

    Args:
        run: its `history` holds the logged metrics of earlier steps (only the main rank's is used).

    Attributes:
        choice: the weight and the learning-rate factor of the next batch.
    """

    def __init__(self, run: Run) -> None:
        spec = run.spec
        self._run, self._is_on = run, spec.algorithm.rollout_correction.auto
        self._ahead = max(spec.rollout.staleness, spec.rollout.max_staleness)
        self._num_groups = float(spec.ppo_mini_batch_size)
        self._means: dict[str, CandidateMoments] = {}
        self._last_discard = 0
        self.choice = AutoChoice()
        if self._is_on:
            for metrics in run.history:
                self._add(metrics)
                self.choice = choose(self._means, self._num_groups, self.choice)
                self._discarded(int(metrics["step"]), bool(metrics.get(_DISCARDED)))
            self.choice = self._shared(self.choice)

    def adjusted(self, settings: UpdateSettings) -> UpdateSettings:
        """The settings of the next batch."""
        if not self._is_on:
            return settings
        rules = replace(settings.rules, weight=CANDIDATES[self.choice.name])
        return replace(settings, rules=rules, auto_lr_scale=self.choice.lr_scale)

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Chooses for the next batch; discards responses that were sampled ahead if they are too old.

        Args:
            metrics: of this step, over all ranks.

        Returns:
            What was in effect in this step, and whether responses were discarded after it.
        """
        if not self._is_on:
            return {}
        self._add(metrics)
        own = {
            "rollout_corr/auto_rule": float(list(CANDIDATES).index(self.choice.name)),
            "rollout_corr/auto_lr_scale": self.choice.lr_scale,
        }
        self.choice = self._shared(choose(self._means, self._num_groups, self.choice))
        is_stale = self._run.ranks.max(float(self._run.ranks.is_main and self._is_too_old(step))) > 0.0
        if is_stale:
            self._run.stream.discard()
        self._discarded(step, is_stale)
        return own | {_DISCARDED: float(is_stale)}

    def _is_too_old(self, step: int) -> bool:
        """Whether waiting responses are too old, newer weights can sample, and the last discard is past."""
        has_new_weights = is_sync_due(self._run, step)
        return (
            has_new_weights and self.choice.lr_scale < TOO_OLD and step - self._last_discard > self._ahead > 0
        )

    def _discarded(self, step: int, is_stale: bool) -> None:
        """The moments of older responses say nothing about those that replace them."""
        if is_stale:
            self._last_discard, self._means = step, {}

    def _add(self, metrics: Mapping[str, float]) -> None:
        found = {name: logged_moments(name, metrics) for name in CANDIDATES}
        batch = {name: moments for name, moments in found.items() if moments is not None}
        self._means = averaged(self._means, batch)

    def _shared(self, own: AutoChoice) -> AutoChoice:
        """The main rank's choice."""
        ranks, names = self._run.ranks, list(CANDIDATES)
        place = ranks.max(float(names.index(own.name)) if ranks.is_main else 0.0)
        return AutoChoice(names[int(place)], ranks.max(own.lr_scale if ranks.is_main else 0.0))


def moment_metrics(name: str, moments: CandidateMoments) -> dict[str, float]:
    """Metrics from which `logged_moments` reads the moments of one candidate."""
    return {_moment_key(moment, name): value for moment, value in asdict(moments).items()}


def logged_moments(name: str, metrics: Mapping[str, float]) -> CandidateMoments | None:
    """The moments of one candidate in a step's metrics; None if they are missing or not finite."""
    values = [metrics.get(_moment_key(field.name, name)) for field in fields(CandidateMoments)]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return CandidateMoments(*known) if len(known) == len(values) else None


def _moment_key(moment: str, name: str) -> str:
    return f"rollout_corr/auto_{moment}/{name}"
