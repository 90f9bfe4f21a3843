"""Sketched gradients of the groups of a batch: under the rule in use, and under exact sequence weights.

With `rollout_correction.auto` also under each candidate weight.

The factor that a rule applies to ∇ log π of a token is −∂loss/∂log π, which autograd computes for any loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields

import torch
from torch import Tensor

from rlctl.algos.auto_correction import CandidateMoments
from rlctl.algos.correction import applied_weights, importance_weights, masked_log_ratio, rejection_mask
from rlctl.algos.gradient_error import gradient_error
from rlctl.algos.row_blocks import Extras, clamped_exp
from rlctl.algos.rules import WeightRule
from rlctl.batch import TrainBatch
from rlctl.engine.protocol import PolicyOutput
from rlctl.engine.ranks import Ranks


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
