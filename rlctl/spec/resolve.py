"""Where dialects die: what the user wrote about rollout correction becomes `CorrectionRules`.

The same words mean different things to the reference guide and to verl 0.9 (`seq_max_k2` at 2.5
admits ρ up to 2.5 there and up to 9.36 here). Both are translated into the one internal form;
nothing below the spec hears of dialects.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable

from rlctl.algos.rules import (
    Bound,
    CorrectionRules,
    LossRule,
    Reduction,
    RejectRule,
    Scope,
    Statistic,
    WeightRule,
)
from rlctl.errors import Problem, SpecError
from rlctl.registry import POLICY_LOSSES
from rlctl.spec.algorithm import RolloutCorrectionSpec
from rlctl.spec.parts import params_of
from rlctl.spec.run_spec import RunSpec

_PREFIX = "algorithm.rollout_correction."
IS_THRESHOLD_KEY = f"{_PREFIX}rollout_is_threshold"
RS_KEY = f"{_PREFIX}rollout_rs"
RS_THRESHOLD_KEY = f"{_PREFIX}rollout_rs_threshold"

#: One or two positive numbers: `2.0` is (2.0,), `0.6_1.6` is (0.6, 1.6).
Numbers = tuple[float, ...]
Criterion = Callable[[str, Numbers], RejectRule]


class _ThresholdError(ValueError):
    """A threshold that means nothing for its criterion; the message says what to write."""


def correction_rules(spec: RolloutCorrectionSpec) -> CorrectionRules:
    """Translate the spec's rollout correction into the form the mathematics understands.

    Raises:
        SpecError: unknown criteria and impossible thresholds, all of them.
    """
    problems: list[Problem] = []
    weight, reject = _weight_rule(spec, problems), _reject_rules(spec, problems)
    if problems:
        raise SpecError(problems)
    return CorrectionRules(weight, reject, spec.loss_denominator)


def loss_rule(spec: RunSpec) -> LossRule:
    """The policy loss with its numbers; a half of the clip left null is `clip_ratio`."""
    actor, correction = spec.actor, spec.algorithm.rollout_correction
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


def correction_problems(spec: RolloutCorrectionSpec) -> list[Problem]:
    """What `correction_rules` would refuse; empty if it would succeed."""
    try:
        correction_rules(spec)
    except SpecError as error:
        return error.problems
    return []


def criteria_of(spec: RolloutCorrectionSpec) -> dict[str, Criterion]:
    """Name → meaning of every rejection criterion the spec's dialect knows."""
    return _VERL_CRITERIA if spec.dialect == "verl" else _GUIDE_CRITERIA


# --- weights ---------------------------------------------------------------------------------


def _weight_rule(spec: RolloutCorrectionSpec, problems: list[Problem]) -> WeightRule:
    """Level and normalisation as written; bound and its interval by dialect and threshold form."""
    is_verl = spec.dialect == "verl"
    try:
        numbers = parse_threshold(spec.rollout_is_threshold)
        bound: Bound = spec.rollout_is_bound or _default_bound(numbers, is_verl=is_verl)
        lower, upper = _weight_interval(numbers, bound)
    except _ThresholdError as error:
        problems.append(Problem("error", IS_THRESHOLD_KEY, str(error), "for example 2.0, or 0.5_2.0"))
        bound, lower, upper = "clip", 0.5, 2.0
    return WeightRule(
        level=spec.rollout_is,
        bound=bound,
        lower=lower,
        upper=upper,
        normalize=spec.rollout_is_batch_normalize,
        normalize_over="all" if is_verl else "survivors",
        metrics="verl" if is_verl else "applied",
    )


def _default_bound(numbers: Numbers, *, is_verl: bool) -> Bound:
    """The guide clips on both sides; verl truncates at one number and masks outside two."""
    if not is_verl:
        return "clip"
    return "truncate" if len(numbers) == 1 else "mask"


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
    names = split_list(spec.rollout_rs)
    thresholds = split_list(spec.rollout_rs_threshold)
    if not names:
        return ()
    if spec.dialect == "verl" and len(thresholds) == 1:
        thresholds = thresholds * len(names)  # verl shares one threshold among all criteria
    if len(thresholds) != len(names):
        problems.append(_count_mismatch(names, thresholds))
        thresholds = []
    criteria = criteria_of(spec)
    rules = []
    for position, name in enumerate(names):
        if name not in criteria:
            problems.append(_unknown_criterion(name, spec))
        elif name in names[:position]:
            problems.append(Problem("error", RS_KEY, f"`{name}` is named twice", "keep one of them"))
        elif thresholds:
            rule = _reject_rule(name, thresholds[position], criteria[name], problems)
            rules += [rule] if rule else []
    return tuple(rules)


def _reject_rule(
    name: str, threshold: str, criterion: Criterion, problems: list[Problem]
) -> RejectRule | None:
    """The rule, unless its threshold is impossible or would reject on-policy data."""
    try:
        rule = criterion(name, parse_threshold(threshold))
    except _ThresholdError as error:
        fix = "for example 2.5, or 0.6_1.6 where both bounds make sense"
        problems.append(Problem("error", RS_THRESHOLD_KEY, f"{name}: {error}", fix))
        return None
    lower, upper = rule.band()
    if lower <= 1.0 <= upper:
        return rule
    what = f"{name}: {threshold} leaves out ρ = 1, so it would reject even on-policy data"
    problems.append(Problem("error", RS_THRESHOLD_KEY, what, "choose bounds with 1 between them"))
    return None


def _count_mismatch(names: list[str], thresholds: list[str]) -> Problem:
    if not thresholds:
        what = f"missing, but rollout_rs names {', '.join(names)}"
    else:
        what = f"{len(thresholds)} given for {len(names)} criteria ({', '.join(names)})"
    example = "for example 0.6_1.6" if names == ["token_k1"] else "for example 0.6_1.6,2.5"
    return Problem("error", RS_THRESHOLD_KEY, what, f"one per criterion, comma separated, {example}")


def _unknown_criterion(name: str, spec: RolloutCorrectionSpec) -> Problem:
    known = list(criteria_of(spec))
    close = difflib.get_close_matches(name, known, n=1)
    elsewhere = {**_GUIDE_CRITERIA, **_VERL_CRITERIA}
    if name in elsewhere:
        fix = f"set dialect: {'guide' if spec.dialect == 'verl' else 'verl'}, where it exists"
    else:
        fix = f"did you mean `{close[0]}`?" if close else f"one of {', '.join(known)}"
    return Problem("error", RS_KEY, f"`{name}` is no criterion of dialect {spec.dialect}", fix)


def parse_threshold(text: str) -> Numbers:
    """`2.0` → (2.0,); `0.6_1.6` → (0.6, 1.6).

    Raises:
        ValueError: not one or two positive finite numbers in ascending order.
    """
    parts = text.strip().split("_")
    try:
        numbers = tuple(float(part) for part in parts)
    except ValueError:
        numbers = ()
    if len(numbers) not in {1, 2} or not all(math.isfinite(number) and number > 0 for number in numbers):
        raise _ThresholdError(f"`{text}` is neither one positive number nor lo_hi such as 0.6_1.6")
    if len(numbers) == 2 and numbers[0] > numbers[1]:
        raise _ThresholdError(f"`{text}`: the lower bound comes first, write {parts[1]}_{parts[0]}")
    return numbers


def split_list(text: str | None) -> list[str]:
    """Comma-separated words without surrounding spaces."""
    return [part.strip() for part in text.split(",")] if text else []


def _one_number(numbers: Numbers, meaning: str) -> float:
    if len(numbers) != 1:
        raise _ThresholdError(f"takes one number ({meaning}), not lo_hi")
    return numbers[0]


def _upper_or_both(numbers: Numbers) -> tuple[float | None, float]:
    """The guide's reading: one number is an upper bound alone."""
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


# Criteria of both worlds.


def _token_veto(name: str, numbers: Numbers) -> RejectRule:
    return RejectRule(name, "ratio", "none", _one_number(numbers, "the smallest ρ allowed"), None, "sequence")


def _off_policy(name: str, numbers: Numbers) -> RejectRule:
    """DeepSeek-V3.2's mask: mean k1 = mean log π_rollout/π_train > δ, and a negative advantage."""
    upper = _one_number(numbers, "the largest mean of log π_rollout − log π_train allowed")
    return RejectRule(name, "k1", "mean", None, upper, "sequence", negative_advantage_only=True)


# What the reference guide says: every threshold is on ρ, every criterion rejects whole sequences.


def _guide_token_k1(name: str, numbers: Numbers) -> RejectRule:
    return RejectRule(name, "ratio", "none", *_upper_or_both(numbers), "sequence")


def _guide_seq_max_k2(name: str, numbers: Numbers) -> RejectRule:
    return RejectRule(name, "ratio", "max", None, _one_number(numbers, "the largest ρ allowed"), "sequence")


def _guide_sequence(name: str, numbers: Numbers) -> RejectRule:
    return RejectRule(name, "ratio", "sum", *_upper_or_both(numbers), "sequence")


def _guide_geometric(name: str, numbers: Numbers) -> RejectRule:
    return RejectRule(name, "ratio", "mean", *_upper_or_both(numbers), "sequence")


_GUIDE_CRITERIA: dict[str, Criterion] = {
    "token_k1": _guide_token_k1,
    "seq_max_k2": _guide_seq_max_k2,
    "sequence": _guide_sequence,
    "geometric": _guide_geometric,
    "token_veto": _token_veto,
    "off_policy": _off_policy,
}


# What verl 0.9 computes: thresholds of k1 become bounds on −log ρ; those of k2 and k3 stay as written.

_SHAPES: dict[str, tuple[Reduction, Scope]] = {
    "token": ("none", "token"),
    "seq_sum": ("sum", "sequence"),
    "seq_mean": ("mean", "sequence"),
    "seq_max": ("max", "sequence"),
}
_STATISTICS: dict[str, Statistic] = {"k1": "k1", "k2": "k2", "k3": "k3"}


def _verl_criterion(name: str, numbers: Numbers) -> RejectRule:
    """Any of verl's `<token|seq_sum|seq_mean|seq_max>_<k1|k2|k3>`."""
    shape, _, statistic = name.rpartition("_")
    reduction, scope = _SHAPES[shape]
    if statistic == "k1":
        lower, upper = numbers if len(numbers) == 2 else (1.0 / numbers[0], numbers[0])
        return RejectRule(name, "k1", reduction, math.log(lower), math.log(upper), scope)
    upper = _one_number(numbers, f"the largest {statistic} allowed")
    return RejectRule(name, _STATISTICS[statistic], reduction, None, upper, scope)


_VERL_CRITERIA: dict[str, Criterion] = {
    "token_k1": _verl_criterion,
    "token_k2": _verl_criterion,
    "token_k3": _verl_criterion,
    "seq_sum_k1": _verl_criterion,
    "seq_sum_k2": _verl_criterion,
    "seq_sum_k3": _verl_criterion,
    "seq_mean_k1": _verl_criterion,
    "seq_mean_k2": _verl_criterion,
    "seq_mean_k3": _verl_criterion,
    "seq_max_k2": _verl_criterion,
    "seq_max_k3": _verl_criterion,
    "token_veto": _token_veto,
    "off_policy": _off_policy,
}
