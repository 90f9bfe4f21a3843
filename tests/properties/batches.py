"""Small hostile batches: ragged, with an empty row, a single token, holes, and NaN in the padding."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rlctl.algos.batch_losses import WholeBatch
from rlctl.algos.correction import correct, normalization_factor
from rlctl.algos.correction_records import Correction, CorrectionSums
from rlctl.algos.estimators import AdvantageInputs
from rlctl.algos.rules import CorrectionRules, LossRule, RejectRule, WeightRule
from rlctl.algos.statistics import correction_metrics, normalized
from rlctl.algos.token_advantages import whiten
from rlctl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES


@dataclass(frozen=True)
class Batch:
    """What a correction reads, all (B, T)."""

    log_probs: Tensor
    rollout_log_probs: Tensor
    mask: Tensor
    advantages: Tensor
    age: Tensor | None = None  # (B,)

    def select(self, rows) -> Batch:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: None if x is None else x[rows] for name, x in given.items()})

    def padded(self, columns: int) -> Batch:
        """Further padding columns on the right, filled with NaN."""
        shape = (len(self.mask), columns)
        nan = torch.full(shape, math.nan)
        return Batch(
            torch.cat([self.log_probs, nan], 1),
            torch.cat([self.rollout_log_probs, nan], 1),
            torch.cat([self.mask, torch.zeros(shape, dtype=torch.bool)], 1),
            torch.cat([self.advantages, torch.zeros(shape)], 1),
            self.age,
        )

    def correct(self, rules: CorrectionRules) -> Correction:
        return correct(
            self.log_probs, self.rollout_log_probs, self.mask, rules, advantages=self.advantages, age=self.age
        )


def make_batch(
    seed: int, rows: int = 7, horizon: int = 6, scale: float = 0.4, *, empty: bool = True
) -> Batch:
    """Log-ratios about N(0, scale²); row 0 has one token, row 1 none (if `empty`), row 2 has holes."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, horizon + 1, (rows,), generator=generator)
    lengths[0] = 1
    if empty and rows > 1:
        lengths[1] = 0
    mask = torch.arange(horizon) < lengths[:, None]
    if rows > 2:
        mask[2] = torch.rand(horizon, generator=generator) < 0.6
        mask[2, -1] = True  # a row may begin with tool output
    rollout = -torch.rand(rows, horizon, generator=generator) * (3 + 4 * scale) - 0.01
    train = (rollout + torch.randn(rows, horizon, generator=generator) * scale).clamp(max=-0.001)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, horizon) * mask
    return Batch(train.masked_fill(~mask, math.nan), rollout.masked_fill(~mask, math.nan), mask, advantages)


def example_params(name: str) -> Any:
    """Parameters of a loss with their defaults, or the first example for required ones; None: it has none."""
    params = POLICY_LOSSES.part(name).params
    fields_of = params.model_fields.items() if params else ()
    examples = {name: (each.examples or [None])[0] for name, each in fields_of if each.is_required()}
    return params(**examples) if params else None


def loss_rule(name: str, *rest: Tensor, **numbers: object) -> LossRule:
    """A loss with the examples of its parameters; `rest` as `WholeBatch.of`: what it reads of the batch."""
    rule = LossRule(name, params=example_params(name), **numbers)
    return WholeBatch.of(*rest).with_statistics(rule) if rest else rule


def estimate(
    name: str, scores: Tensor, group_ids: Tensor, valid: Tensor, lengths: Tensor | None = None, **more: Any
) -> Tensor:
    """(B,) advantages of a registered estimator with one per response; `more` as in `AdvantageInputs`."""
    lengths = torch.ones_like(group_ids) if lengths is None else lengths
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    given = {"gamma": 1.0, "lam": 1.0, "divide_by_std": True, "whiten": whiten} | more
    return ADVANTAGE_ESTIMATORS[name](AdvantageInputs(scores[:, None], mask, group_ids, valid, **given))


def weight_rules() -> list[WeightRule]:
    """Every level × bound × normalisation × metric convention."""
    normalisations = [(False, "survivors"), (True, "survivors"), (True, "all")]
    return [
        WeightRule(level, bound, 0.6, 1.7, normalize, over, metrics)
        for level, bound, (normalize, over), metrics in itertools.product(
            (None, "token", "sequence", "geometric"),
            ("clip", "truncate", "mask"),
            normalisations,
            (None, "verl"),
        )
    ]


#: Bounds that reject some but not all of `make_batch`, by statistic.
_BOUNDS = {"ratio": (0.65, 1.6), "k1": (-0.4, 0.5), "k2": (0.005, 0.15), "k3": (0.004, 0.12)}


def reject_rules() -> list[RejectRule]:
    """Every statistic × reduction × scope × form of bounds, with and without dependence on the advantage."""
    rules = []
    for statistic, reduction in itertools.product(_BOUNDS, ("none", "sum", "mean", "max")):
        low, high = _BOUNDS[statistic]
        bounds = [(None, high), (low, high), (low, None)]
        scopes = [("token", False)] if reduction == "none" else []
        scopes += [("sequence", False), ("sequence", True)]
        for (lower, upper), (scope, negative) in itertools.product(bounds, scopes):
            name = f"rule{len(rules)}"
            rules.append(RejectRule(name, statistic, reduction, lower, upper, scope, negative))
    return rules


def factor_and_metrics(correction: Correction, rules: CorrectionRules) -> tuple[float, dict[str, float]]:
    """What one mini-batch logs, from its merged sums."""
    host: CorrectionSums[float] = correction.sums.to_host()
    factor = normalization_factor(host, rules)
    return factor, correction_metrics(normalized(host, factor, rules), rules)
