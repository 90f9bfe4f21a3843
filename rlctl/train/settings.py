"""Settings of the policy's updates, and the learning rates of policy and critic.

All follow from the spec and the number of the step or update, without state to save.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from rlctl.algos.rules import CorrectionRules, LossRule, RejectRule, WeightRule
from rlctl.registry import CORRECTION_WEIGHTS, KL_ESTIMATORS, POLICY_LOSSES
from rlctl.spec.algorithm import ActorSpec, CriticSpec
from rlctl.spec.resolve import correction_rules, loss_rule
from rlctl.spec.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Settings of the policy's updates: a spec, and its rules as the algorithms read them.

    Attributes:
        rules: of the correction; other ones than the spec's while they are tightened.
    """

    spec: RunSpec
    rules: CorrectionRules
    loss: LossRule

    @classmethod
    def of(cls, spec: RunSpec) -> UpdateSettings:
        """Reads the rules from the spec."""
        rules = correction_rules(spec.algorithm.rollout_correction)
        return cls(spec, replace(rules, unit=spec.algorithm.unit), loss_rule(spec))

    @property
    def actor(self) -> ActorSpec:
        """The section `actor` of the spec."""
        return self.spec.actor

    @property
    def bypass(self) -> bool:
        """Whether π_old is π_rollout."""
        return self.spec.algorithm.rollout_correction.bypass_mode

    @property
    def centers_scores(self) -> bool:
        """Whether the expected score under the sampler is subtracted, see `rlctl.algos.score_centering`."""
        return self.spec.algorithm.rollout_correction.score_centering is not None

    @property
    def teacher_kl_coef(self) -> float:
        """Coefficient of the KL to the teacher in the loss; 0: there is none."""
        teacher = self.spec.algorithm.teacher
        return teacher.kl_coef if teacher.path and teacher.kl_in == "loss" else 0.0

    @property
    def teacher_kl_type(self) -> str | None:
        """Its KL estimator; None: the KL of the teacher's most likely tokens and the others."""
        return self.spec.algorithm.teacher.kl_type

    def tightened(self) -> UpdateSettings:
        """A copy with all bounds in effect tightened (`tighter_…`); equal to `self` if there are none."""
        weight = tighter_weight(self.rules.weight) if self.weights_are_applied else self.rules.weight
        reject = tuple(tighter_criterion(rule) for rule in self.rules.reject)
        return replace(self, rules=replace(self.rules, weight=weight, reject=reject))

    @property
    def kl_loss_type(self) -> str | None:
        """KL estimator of the KL loss; None: no KL in the loss."""
        return self.actor.kl_loss_type if self.actor.use_kl_loss else None

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
        return self.loss.needs_statistics or bool(self.actor.router_aux_loss_coef)

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
    def weights_teacher(self) -> bool:
        """Whether importance weights, if applied, multiply the KL to the teacher.

        Not if it contains π_θ/π_rollout itself. Without the sampled token in it, the token's own ratio would
        add noise: such a KL depends on the policies by the tokens before it only.
        """
        if self.teacher_kl_type is not None:
            return "rollout_log_probs" not in KL_ESTIMATORS.part(self.teacher_kl_type).needs
        return CORRECTION_WEIGHTS.part(self.rules.weight.level or "token").unit != "token"

    @property
    def has_kl(self) -> bool:
        """Whether a KL is in the loss."""
        return self.kl_loss_type is not None or self.teacher_kl_coef > 0

    @property
    def vanishes_without_advantage(self) -> bool:
        """Whether tokens with advantage 0 have no gradient: no other term of the loss applies to them."""
        has_terms = bool(self.actor.entropy_coeff or self.actor.router_aux_loss_coef or self.has_kl)
        return POLICY_LOSSES.part(self.loss.name).vanishes_without_advantage and not has_terms

    @property
    def statistics_only_scale(self) -> bool:
        """Whether these statistics only scale the loss, so that its gradient can be scaled afterwards.

        Denominators divide all terms equally. The mean weight divides only the policy-gradient term, which
        is proportional to the weights for every loss.
        """
        has_other_terms = bool(self.actor.entropy_coeff) or self.has_kl
        return not self.needs_policy_statistics and not (self.normalizes and has_other_terms)


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
        lower, upper = rule.lower, None if rule.upper is None else rule.upper / 4
    else:
        _, highest = rule.band()
        upper = rule.upper if math.isinf(highest) else math.sqrt(highest) - 1 - math.log(highest) / 2
        lower = rule.lower
    return replace(rule, lower=lower, upper=upper)


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
    peak, warmup = of.lr, of.lr_warmup_steps
    if update < warmup:
        return peak * (update + 1) / warmup
    if kind == "constant":
        return peak
    progress = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    if kind == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
