"""Translation of the rollout correction of a spec into `CorrectionRules`.

The same name can have different meanings in the dialects `rlctl` and `verl` (`seq_max_k2` at 2.5 accepts ρ up
to 2.5 in the first and up to 9.36 in the second). Rules are independent of the dialect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from rlctl.algos.rules import (
    BASIC_STATISTICS,
    Bound,
    CorrectionRules,
    LossRule,
    Reduction,
    RejectRule,
    Scope,
    WeightRule,
)
from rlctl.errors import Problem, SpecError, UsageError
from rlctl.registry import CORRECTION_WEIGHTS, POLICY_LOSSES, REJECTION_CRITERIA
from rlctl.run_spec.algorithm import CORRECTION, RolloutCorrectionSpec
from rlctl.run_spec.base import param_problems, params_of, unread_params
from rlctl.run_spec.keys import did_you_mean
from rlctl.run_spec.run_spec import RunSpec
from rlctl.user_code import is_file_function, split_names

IS_THRESHOLD_KEY = f"{CORRECTION}rollout_is_threshold"
RS_KEY = f"{CORRECTION}rollout_rs"
_MOST_CRITERIA = 32  # suggestions for invalid lists grow with the square of their length
RS_THRESHOLD_KEY = f"{CORRECTION}rollout_rs_threshold"

#: One or two positive numbers: `2.0` is (2.0,), `0.6_1.6` is (0.6, 1.6).
Numbers = tuple[float, ...]
#: Lower and upper bound on a statistic; None: not bounded.
Bounds = tuple[float | None, float | None]


class _ThresholdError(ValueError):
    """A threshold that is invalid for its weight or criterion; the message explains what to write."""


def correction_rules(spec: RolloutCorrectionSpec) -> CorrectionRules:
    """Translate the spec's rollout correction into rules.

    Raises:
        SpecError: with every unknown criterion, and every invalid threshold or parameter.
    """
    rules, problems = _resolved(spec)
    if problems:
        raise SpecError(problems)
    return rules


def correction_problems(spec: RolloutCorrectionSpec) -> list[Problem]:
    """The problems that `correction_rules` would raise; empty if it would succeed."""
    return _resolved(spec)[1]


def _resolved(spec: RolloutCorrectionSpec) -> tuple[CorrectionRules, list[Problem]]:
    problems: list[Problem] = []
    weight = _weight_rule(spec, problems)
    reject = _reject_rules(spec, problems)
    return CorrectionRules(weight, reject, spec.loss_denominator), problems


def loss_rule(spec: RunSpec) -> LossRule:
    """The policy loss with its parameters; null in `clip_ratio_low` or `clip_ratio_high` is `clip_ratio`."""
    actor = spec.actor
    correction = spec.algorithm.rollout_correction
    return LossRule(
        name=correction.loss_type,
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        divergence=actor.dppo_divergence,
        params=params_of(POLICY_LOSSES.part(correction.loss_type), correction.loss_params),
    )


# --- weights ---------------------------------------------------------------------------------


def _weight_rule(spec: RolloutCorrectionSpec, problems: list[Problem]) -> WeightRule:
    """The weight rule; its default bound depends on the dialect and the form of the threshold.

    `rlctl` clips on both sides; `verl` truncates for one number and masks outside an interval.
    """
    is_verl = spec.dialect == "verl"
    params = None
    key = f"{CORRECTION}rollout_is_params"
    if spec.rollout_is is None:
        message = "rollout_is is null, so no weight has this parameter"
        problems += unread_params(key, spec.rollout_is_params, message)
    elif faults := param_problems(CORRECTION_WEIGHTS, spec.rollout_is, key, spec.rollout_is_params):
        problems += faults
    else:
        params = params_of(CORRECTION_WEIGHTS.part(spec.rollout_is), spec.rollout_is_params)
    try:
        numbers = parse_threshold(spec.rollout_is_threshold)
        default: Bound = "clip"
        if is_verl:
            default = "truncate" if len(numbers) == 1 else "mask"
        bound = spec.rollout_is_bound or default
        lower, upper = _weight_interval(numbers, bound)
    except _ThresholdError as error:
        problems.append(Problem("error", IS_THRESHOLD_KEY, str(error), "for example 2.0, or 0.5_2.0"))
        bound = "clip"
        lower = 0.5
        upper = 2.0
    return WeightRule(
        level=spec.rollout_is,
        bound=bound,
        lower=lower,
        upper=upper,
        normalize=spec.rollout_is_batch_normalize,
        normalize_over="all" if is_verl else "survivors",
        metrics="verl" if is_verl else None,
        params=params,
    )


def _weight_interval(numbers: Numbers, bound: Bound) -> tuple[float, float]:
    """Bounds on the weight; one number c means [1/c, c]."""
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    upper = numbers[0]
    if bound != "truncate" and upper < 1.0:
        raise _ThresholdError(
            f"one number c means [1/c, c], which is empty for c = {upper:g}; write c ≥ 1, or lo_hi"
        )
    return 1.0 / upper, upper


# --- rejection -------------------------------------------------------------------------------


def _reject_rules(spec: RolloutCorrectionSpec, problems: list[Problem]) -> tuple[RejectRule, ...]:
    """One rule per comma-separated name, each with its own threshold."""
    names = split_names(spec.rollout_rs) if spec.rollout_rs else []
    thresholds = split_names(spec.rollout_rs_threshold) if spec.rollout_rs_threshold else []
    if spec.dialect == "verl" and len(thresholds) == 1:
        thresholds = thresholds * len(names)  # verl shares one threshold among all criteria
    if len(names) > _MOST_CRITERIA:
        message = f"{len(names)} criteria; at most {_MOST_CRITERIA} are possible"
        problems.append(Problem("error", RS_KEY, message, "name each criterion once"))
        return ()
    rules: dict[str, RejectRule] = {}
    fitting: dict[str, str] = {}  # criterion → its threshold if valid, or an example
    faults: list[str] = []  # what is wrong with the thresholds
    is_doubled = False
    unread = dict(spec.rollout_rs_params)
    if names and len(thresholds) != len(names):
        count = f"{len(thresholds)} given for {len(names)} criteria" if thresholds else "missing"
        faults.append(f"{count}; rollout_rs names {', '.join(names)}")
        thresholds = []
    in_metrics = [_metric_name(name) for name in names]
    for position, name in enumerate(names):
        criterion = _criterion(name, spec, unread, problems)
        if name in names[:position]:
            is_doubled = True
        elif criterion is not None:
            rule = _reject_rule(name, thresholds[position], criterion, faults) if thresholds else None
            rules |= {name: rule} if rule else {}
            fitting[name] = thresholds[position] if rule else criterion.example(name)
    # The suggested thresholds must match the list of criteria, and vice versa.
    fix = f"for example {','.join(fitting.values())}" if fitting else "name a criterion in rollout_rs"
    problems += [Problem("error", RS_THRESHOLD_KEY, fault, fix) for fault in faults]
    if is_doubled:
        both = f"write rollout_rs: {','.join(fitting)} and rollout_rs_threshold: {','.join(fitting.values())}"
        problems.append(Problem("error", RS_KEY, "a criterion is named twice", both))
    elif len(set(in_metrics)) < len(names):
        again = next(name for index, name in enumerate(in_metrics) if name in in_metrics[:index])
        message = f"two criteria write metrics under the name {again}"
        problems.append(Problem("error", RS_KEY, message, "rename the function in the file"))
    message = "no criterion of rollout_rs has this parameter"
    problems += unread_params(f"{CORRECTION}rollout_rs_params", unread, message)
    return tuple(rules.values())


def _criterion(
    name: str, spec: RolloutCorrectionSpec, unread: dict[str, Any], problems: list[Problem]
) -> _Criterion | None:
    """Looks a name up in the dialect, else in the registry; removes its parameters from `unread`."""
    if name in _CRITERIA[spec.dialect]:
        return _CRITERIA[spec.dialect][name]
    if not is_file_function(name) and name not in registered_criteria():
        problems.append(_unknown_criterion(name, spec.dialect))
        return None
    try:
        criterion = REJECTION_CRITERIA.part(name)
    except UsageError as error:
        message = f"{error.where}: {error.what}" if error.where else error.what
        problems.append(Problem("error", RS_KEY, message, error.fix))
        return None
    declared = criterion.params.model_fields if criterion.params else {}
    params = {key: value for key, value in spec.rollout_rs_params.items() if key in declared}
    for key in params:
        unread.pop(key, None)
    faults = param_problems(REJECTION_CRITERIA, name, f"{CORRECTION}rollout_rs_params", params)
    problems += faults
    if faults:
        return None
    reduction: Reduction = "none" if criterion.unit == "token" else "given"
    form = _form(criterion.name, reduction, criterion.unit, params=params_of(criterion, params))
    return _Criterion(form, _largest_or_both)


def registered_criteria() -> list[str]:
    """Criteria that have the same name and meaning in every dialect."""
    return [name for name in REJECTION_CRITERIA if name not in BASIC_STATISTICS]


def criteria_names() -> list[str]:
    """Every criterion: those of both dialects, then the registered ones."""
    return list(dict.fromkeys([*_CRITERIA["rlctl"], *_CRITERIA["verl"], *registered_criteria()]))


def _reject_rule(name: str, threshold: str, criterion: _Criterion, faults: list[str]) -> RejectRule | None:
    """The rule; None, with an entry in `faults`, if the threshold is invalid or would reject on-policy data.

    The latter is detected only for statistics that bound ρ.
    """
    try:
        lower, upper = criterion.bounds(parse_threshold(threshold))
    except _ThresholdError as error:
        faults.append(f"{name}: {error}")
        return None
    rule = replace(criterion.form, name=_metric_name(name), lower=lower, upper=upper)
    lowest, highest = rule.band()
    if lowest <= 1.0 <= highest:
        return rule
    faults.append(f"{name}: {threshold} leaves out ρ = 1, so it would reject even on-policy data")
    return None


def _unknown_criterion(name: str, dialect: str) -> Problem:
    other = "rlctl" if dialect == "verl" else "verl"
    known = [*_CRITERIA[dialect], *registered_criteria()]
    fix = did_you_mean(name, known, f"one of {', '.join(known)}, or path/to/file.py:function")
    if name in _CRITERIA[other]:
        fix = f"set dialect: {other}, where it exists"
    return Problem("error", RS_KEY, f"`{name}` is no criterion of dialect {dialect}", fix)


def parse_threshold(text: str) -> Numbers:
    """`2.0` → (2.0,); `0.6_1.6` → (0.6, 1.6).

    Raises:
        ValueError: not one or two positive finite numbers in ascending order.
    """
    parts = text.strip().split("_")
    try:
        numbers = tuple(float(number) for number in parts)
    except ValueError:
        numbers = ()
    if len(numbers) not in {1, 2} or not all(math.isfinite(number) and number > 0 for number in numbers):
        raise _ThresholdError(f"`{text}` is neither one positive number nor lo_hi such as 0.6_1.6")
    if len(numbers) == 2 and numbers[0] > numbers[1]:
        raise _ThresholdError(f"`{text}`: the lower bound comes first, write {parts[1]}_{parts[0]}")
    return numbers


class _Criterion(NamedTuple):
    """A rejection criterion: a rule without name and bounds, and the bounds that a threshold sets."""

    form: RejectRule
    bounds: Callable[[Numbers], Bounds]

    def example(self, name: str) -> str:
        """A threshold that is valid for this criterion."""
        tried = (*REJECTION_CRITERIA.part(self.form.statistic).thresholds, "0.1", "2.5")
        return next(text for text in tried if _reject_rule(name, text, self, []))


def examples(name: str) -> Iterator[tuple[str, str, RejectRule]]:
    """Dialect, a threshold and the rule that this makes, for each dialect that has the criterion."""
    for dialect in _CRITERIA:
        spec = RolloutCorrectionSpec.model_validate({"dialect": dialect})
        criterion = _criterion(name, spec, {}, [])
        if criterion:
            threshold = criterion.example(name)
            rule = _reject_rule(name, threshold, criterion, [])
            if rule:
                yield dialect, threshold, rule


def _form(statistic: str, reduction: Reduction, scope: Scope = "sequence", **others: Any) -> RejectRule:
    return RejectRule(
        name="",
        statistic=statistic,
        reduction=reduction,
        lower=None,
        upper=None,
        scope=scope,
        **others,
    )


def _metric_name(criterion: str) -> str:
    """The name in metrics: for a function of a user's file, the name of the function."""
    return criterion.rpartition(":")[2]


def _one_bound(side: Literal["smallest", "largest"], meaning: str) -> Callable[[Numbers], Bounds]:
    def bounds(numbers: Numbers) -> Bounds:
        if len(numbers) != 1:
            raise _ThresholdError(f"takes one number (the {side} {meaning} allowed), not lo_hi")
        return (numbers[0], None) if side == "smallest" else (None, numbers[0])

    return bounds


def _largest_or_both(numbers: Numbers) -> Bounds:
    """One number is an upper bound; two are lower and upper bound."""
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _logs(numbers: Numbers) -> Bounds:
    """verl's thresholds for k1 = −log ρ are given as ratios; one number c means [1/c, c]."""
    lower, upper = numbers if len(numbers) == 2 else (1.0 / numbers[0], numbers[0])
    return math.log(lower), math.log(upper)


_OF_BOTH = {
    "token_veto": _Criterion(_form("ratio", "none"), _one_bound("smallest", "ρ")),
    # DeepSeek-V3.2's mask: mean k1 = mean log π_rollout/π_train > δ, and a negative advantage.
    "off_policy": _Criterion(
        _form("k1", "mean", negative_advantage_only=True),
        _one_bound("largest", "mean of log π_rollout − log π_train"),
    ),
}
_SHAPES: dict[str, tuple[Reduction, Scope]] = {
    "token": ("none", "token"),
    "seq_sum": ("sum", "sequence"),
    "seq_mean": ("mean", "sequence"),
    "seq_max": ("max", "sequence"),
}
_STATISTICS: dict[str, Callable[[Numbers], Bounds]] = {
    "k1": _logs,
    "k2": _one_bound("largest", "k2"),
    "k3": _one_bound("largest", "k3"),
}
#: Dialect → name → criterion. In `rlctl` thresholds bound ρ (except `off_policy`), and every criterion
#: rejects whole sequences. verl 0.9 has `<shape>_<statistic>`.
_CRITERIA: dict[str, dict[str, _Criterion]] = {
    "rlctl": {
        "token_k1": _Criterion(_form("ratio", "none"), _largest_or_both),
        "seq_max_k2": _Criterion(_form("ratio", "max"), _one_bound("largest", "ρ")),
        "sequence": _Criterion(_form("ratio", "sum"), _largest_or_both),
        "geometric": _Criterion(_form("ratio", "mean"), _largest_or_both),
        **_OF_BOTH,
    },
    "verl": {
        f"{shape}_{statistic}": _Criterion(_form(statistic, reduction, scope), bounds)
        for shape, (reduction, scope) in _SHAPES.items()
        for statistic, bounds in _STATISTICS.items()
        if (shape, statistic) != ("seq_max", "k1")
    }
    | _OF_BOTH,
}
