"""Small hostile batches: ragged, with a response of one token and one of none."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlctl.algos.batch_losses import WholeBatch
from rlctl.algos.correction import Correction, correct
from rlctl.algos.estimators import AdvantageInputs
from rlctl.algos.rules import CorrectionRules, LossRule, RejectRule, WeightRule
from rlctl.algos.segments import Segments, Units
from rlctl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from rlctl.run_spec.algorithm import ActorSpec, RolloutCorrectionSpec, TeacherSpec
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.capability import capabilities_of
from rlctl.train.settings import UpdateSettings


@dataclass(frozen=True)
class Batch:
    """What a correction reads, columns (M,) of the tokens of each response."""

    log_probs: Tensor
    rollout_log_probs: Tensor
    unit: Segments
    advantages: Tensor
    age: Tensor | None = None

    @property
    def units(self) -> Units:
        return Units(self.unit, self.unit, self.unit)

    @property
    def policies(self) -> tuple[Tensor, Tensor, Tensor, Segments]:
        """π_θ, π_old and advantages as `WholeBatch` and `policy_loss` take them."""
        return self.log_probs, self.rollout_log_probs, self.advantages, self.unit

    def double(self) -> Batch:
        columns = (self.log_probs.double(), self.rollout_log_probs.double())
        return Batch(*columns, self.unit, self.advantages.double(), self.age)

    def of_tokens(self, kept: Tensor) -> Batch:
        """Only the tokens where `kept` (M,) is True."""
        columns = (self.log_probs[kept], self.rollout_log_probs[kept])
        age = None if self.age is None else self.age[kept]
        return Batch(*columns, self.unit.kept(kept), self.advantages[kept], age)

    def select(self, responses: Tensor | list[int]) -> Batch:
        """These responses, in that order."""
        chosen = torch.as_tensor(responses)
        places = self.unit.entries_of(chosen)
        columns = (self.log_probs[places], self.rollout_log_probs[places])
        age = None if self.age is None else self.age[places]
        return Batch(*columns, Segments(self.unit.lengths[chosen]), self.advantages[places], age)

    def correct(self, rules: CorrectionRules) -> Correction:
        columns = (self.log_probs, self.rollout_log_probs)
        return correct(*columns, self.units, rules, advantages=self.advantages, age=self.age)


def drawn_rows(
    seed: int, rows: int = 7, horizon: int = 6, scale: float = 0.4, *, empty: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and rollout log-probs and mask (B, T), advantages (B,), with log-ratios about N(0, scale²).

    Row 0 has one token, row 1 none (if `empty`), row 2 has holes.
    """
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
    return train, rollout, mask, torch.randn(rows, generator=generator)


def make_batch(*args: Any, **options: Any) -> Batch:
    """`drawn_rows` as columns."""
    train, rollout, mask, advantages = drawn_rows(*args, **options)
    unit = Segments(mask.sum(1))
    return Batch(train[mask], rollout[mask], unit, unit.spread(advantages))


def by_response(unit: Segments, *columns: Tensor) -> list[tuple[list[Any], ...]]:
    """For each response, the numbers of each column as a list."""
    parts = [column.split(unit.lengths.tolist()) for column in columns]
    return [tuple(part.tolist() for part in each) for each in zip(*parts, strict=True)]


def example_params(name: str) -> Any:
    """Parameters of a loss with their defaults, or the first example for required ones; None: it has none."""
    params = POLICY_LOSSES.part(name).params
    fields_of = params.model_fields.items() if params else ()
    examples = {name: (each.examples or [None])[0] for name, each in fields_of if each.is_required()}
    return params(**examples) if params else None


@cache
def _default_spec() -> RunSpec:
    return load_spec([], [], []).spec


def update_settings(
    rules: CorrectionRules,
    loss: LossRule,
    *,
    actor: ActorSpec,
    correction: RolloutCorrectionSpec,
    teacher: TeacherSpec | None = None,
    groups: tuple[int, int],
    horizon: int,
) -> UpdateSettings:
    """`groups`: of a mini-batch, and of the batch."""
    base, (mini_groups, num_groups) = _default_spec(), groups
    algorithm = {"rollout_correction": correction, "teacher": teacher or TeacherSpec()}
    sections = {
        "actor": actor.model_copy(update={"ppo_mini_batch_size": mini_groups}),
        "algorithm": base.algorithm.model_copy(update=algorithm),
        "data": base.data.model_copy(update={"train_batch_size": num_groups, "max_response_length": horizon}),
    }
    spec = base.model_copy(update=sections)
    return UpdateSettings(spec, rules, loss, capabilities_of(spec))


def loss_rule(name: str, *rest: Any, **numbers: object) -> LossRule:
    """A loss with the examples of its parameters; `rest` as `WholeBatch`: what it reads of the batch."""
    rule = LossRule(name, params=example_params(name), **numbers)
    return WholeBatch(*rest).with_statistics(rule) if rest else rule


def advantage_inputs(scores: Tensor, group_ids: Tensor, lengths: Tensor, **more: Any) -> AdvantageInputs:
    """Episodes of these lengths with a score at their last token; `more` as in `AdvantageInputs`."""
    unit = Segments(lengths)
    last = unit.places == unit.spread(lengths) - 1
    given = {"gamma": 1.0, "lam": 1.0, "divide_by_std": True} | more
    rewards = torch.where(last, unit.spread(scores), 0.0)
    return AdvantageInputs(rewards, scores, Units(unit, unit, unit), group_ids, **given)


def estimate(
    name: str, scores: Tensor, group_ids: Tensor, lengths: Tensor | None = None, **more: Any
) -> Tensor:
    """(E,) advantages of a registered estimator with one per episode."""
    lengths = torch.ones_like(group_ids) if lengths is None else lengths
    return ADVANTAGE_ESTIMATORS[name](advantage_inputs(scores, group_ids, lengths, **more))


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
