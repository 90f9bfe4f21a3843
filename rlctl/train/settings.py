"""Settings of advantages and updates, what is due after a step, the learning rates of policy and critic.

All follow from the spec and the number of the step or update, without state to save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from rlctl.algos.rules import CorrectionRules, LossRule, RejectRule, WeightRule
from rlctl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from rlctl.run_spec.algorithm import ActorSpec, AlgorithmSpec, CriticSpec
from rlctl.run_spec.base import params_of
from rlctl.run_spec.resolve import correction_rules, loss_rule
from rlctl.run_spec.run_spec import RunSpec
from rlctl.train.capability import Capability
from rlctl.train.terms import Term


@dataclass(frozen=True, slots=True)
class EstimatorSettings:
    """The advantage estimator of a spec.

    Attributes:
        name: of the estimator.
        needs: fields of `AdvantageInputs` that it reads.
        inputs: its settings, by their names in `AdvantageInputs`.
    """

    name: str
    needs: frozenset[str]
    inputs: Mapping[str, Any]

    @classmethod
    def of(cls, algorithm: AlgorithmSpec) -> EstimatorSettings:
        """Reads them from the section `algorithm` of a spec."""
        estimator = ADVANTAGE_ESTIMATORS.part(algorithm.adv_estimator)
        inputs = {
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "divide_by_std": algorithm.norm_adv_by_std_in_grpo,
            "gamma_per": algorithm.gamma_per,
            "params": params_of(estimator, algorithm.adv_params),
        }
        return cls(algorithm.adv_estimator, frozenset(estimator.needs), inputs)


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of the policy's updates: a spec, and its rules as the algorithms read them.

    Attributes:
        rules: of the correction; other ones than the spec's while they are tightened.
        capabilities: that the spec uses; their terms depend on the rules.
    """

    spec: RunSpec
    rules: CorrectionRules
    loss: LossRule
    capabilities: tuple[Capability, ...]

    @classmethod
    def of(cls, spec: RunSpec, capabilities: tuple[Capability, ...]) -> UpdateSettings:
        """Reads the rules from the spec."""
        rules = correction_rules(spec.algorithm.rollout_correction)
        return cls(spec, replace(rules, unit=spec.algorithm.unit), loss_rule(spec), capabilities)

    @property
    def actor(self) -> ActorSpec:
        """The section `actor` of the spec."""
        return self.spec.actor

    @property
    def bypass(self) -> bool:
        """Whether π_old is π_rollout."""
        return self.spec.algorithm.rollout_correction.bypass_mode

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        """The terms of the loss beside the policy gradient."""
        return tuple(term for each in self.capabilities for term in each.terms(self.rules))

    def tightened(self) -> UpdateSettings:
        """A copy with all bounds in effect tightened (`tighter_…`); equal to `self` if there are none."""
        weight = tighter_weight(self.rules.weight) if self.weights_are_applied else self.rules.weight
        reject = tuple(tighter_criterion(rule) for rule in self.rules.reject)
        return replace(self, rules=replace(self.rules, weight=weight, reject=reject))

    @property
    def weights_are_applied(self) -> bool:
        """Whether correction weights multiply the loss.

        In bypass mode they do not multiply a loss that contains the ratio π_θ/π_rollout, because that ratio
        is the correction.
        """
        return self.rules.weight.level is not None and not (self.bypass and self.loss.has_ratio)

    @property
    def needs_policy_statistics(self) -> bool:
        """Whether the loss needs statistics of the whole mini-batch that depend on π_θ."""
        return self.loss.needs_statistics or any(term.reads_mini_batch for term in self.terms)

    @property
    def normalizes(self) -> bool:
        """Whether the loss needs the mean weight of the whole mini-batch."""
        return self.weights_are_applied and self.rules.weight.normalize

    @property
    def needs_statistics(self) -> bool:
        """Whether the loss needs statistics of the whole mini-batch that depend on π_θ or the correction."""
        after = self.rules.loss_denominator == "after_rejection"
        return self.normalizes or after or self.needs_policy_statistics

    @property
    def vanishes_without_advantage(self) -> bool:
        """Whether tokens with advantage 0 have no gradient: no term of the loss applies to them."""
        return POLICY_LOSSES.part(self.loss.name).vanishes_without_advantage and all(
            term.vanishes_without_advantage for term in self.terms
        )

    @property
    def statistics_only_scale(self) -> bool:
        """Whether these statistics only scale the loss, so that its gradient can be scaled afterwards.

        Denominators divide all terms equally. The mean weight divides only the policy-gradient term, which
        is proportional to the weights for every loss, and the terms that say so.
        """
        is_divided = all(term.scales_with_weights for term in self.terms)
        return not self.needs_policy_statistics and (is_divided or not self.normalizes)


def tighter_weight(rule: WeightRule) -> WeightRule:
    """The rule with half the distance of its bounds from ρ = 1 in log ρ: [√lower, √upper]."""
    return replace(rule, lower=math.sqrt(rule.lower), upper=math.sqrt(rule.upper))


def tighter_criterion(rule: RejectRule) -> RejectRule:
    """The criterion with its accepted band of ρ half as wide in log ρ.

    k3 = ρ − 1 − log ρ is not symmetric: its upper side is halved exactly, the lower side follows. A
    statistic that does not bound ρ keeps its bounds.
    """
    if not rule.bounds_ratio:
        return rule
    if rule.statistic == "ratio":
        lower, upper = (None if bound is None else math.sqrt(bound) for bound in (rule.lower, rule.upper))
    elif rule.statistic == "k1":
        lower, upper = (None if bound is None else bound / 2 for bound in (rule.lower, rule.upper))
    elif rule.statistic == "k2":
        lower = rule.lower
        upper = None if rule.upper is None else rule.upper / 4
    else:
        _, highest = rule.band()
        upper = rule.upper if math.isinf(highest) else math.sqrt(highest) - 1 - math.log(highest) / 2
        lower = rule.lower
    return replace(rule, lower=lower, upper=upper)


# --- what is due after a step -----------------------------------------------------------------------


def is_validation_due(spec: RunSpec, step: int, total_steps: int) -> bool:
    """Whether the policy is validated after `step`: at the end too."""
    frequency = spec.trainer.test_freq
    return is_due(step, frequency) or (frequency > 0 and step == total_steps)


def is_sync_due(spec: RunSpec, step: int, total_steps: int) -> bool:
    """Whether the rollout engine gets new weights after `step`: also before a validation of this policy."""
    # Also with every save, because a resumed run samples with the saved weights.
    every = spec.rollout.sync_every, spec.trainer.save_freq
    return any(is_due(step, frequency) for frequency in every) or is_validation_due(spec, step, total_steps)


def is_due(step: int, frequency: int) -> bool:
    """Whether `step` is a multiple of `frequency`; never for 0 or -1."""
    return frequency > 0 and step % frequency == 0


# --- learning rates ---------------------------------------------------------------------------------


def planned_updates(spec: RunSpec, step: int) -> int:
    """Planned optimizer updates of the policy before a step, withheld ones included."""
    return max(step - 1 - spec.trainer.critic_warmup, 0) * spec.updates_per_batch


def actor_schedule(spec: RunSpec, total_steps: int) -> Callable[[int], float]:
    """Learning rate of the policy by number of the planned update (none while a critic warms up)."""
    total = planned_updates(spec, total_steps + 1)
    return partial(lr_at, total_updates=total, of=spec.actor, kind=spec.actor.lr_scheduler_type)


def critic_schedule(spec: RunSpec, total_steps: int) -> Callable[[int], float]:
    """Learning rate of the critic by number of its update, with the actor's type of schedule."""
    total = total_steps * spec.critic_updates_per_batch
    return partial(lr_at, total_updates=total, of=spec.critic, kind=spec.actor.lr_scheduler_type)


def lr_at(update: int, total_updates: int, of: ActorSpec | CriticSpec, kind: str) -> float:
    """Learning rate of optimizer update number `update` (from 0), for a `kind` of schedule.

    Linear warm-up over the first `lr_warmup_steps` updates, reaching `lr` on the last of them; then constant,
    or decay to 0 at `total_updates`.
    """
    peak = of.lr
    warmup = of.lr_warmup_steps
    if update < warmup:
        return peak * (update + 1) / warmup
    if kind == "constant":
        return peak
    progress = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    if kind == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
