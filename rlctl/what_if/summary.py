"""From a replay's sums to what is reported and recommended."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlctl.algos.correction_records import CorrectionSums
from rlctl.algos.metric_sums import ratio
from rlctl.algos.rules import CorrectionRules
from rlctl.what_if.moments import Floats, ScoreMoments
from rlctl.what_if.proxies import Proxies, draws, interval, proxies
from rlctl.what_if.settings import Setting
from rlctl.what_if.tradeoff import IntervalEstimate, Recommendation, SettingOutcome, Tradeoff

#: A setting replaces the run's own only if it is better in this share of resamples, and by this share of
#: the run's own error: a difference must be both certain and worth a change.
DECISIVE, MATERIAL = 0.95, 0.05
#: Fewer groups than this leave intervals without meaning.
FEW_GROUPS = 32


@dataclass(frozen=True, slots=True)
class RankedSetting:
    """What the pass over the dump added up, for R different rules.

    Attributes:
        names: settings that mean this rule, in the grid's order; none for a rule only measured.
        rules, metrics, corrections: each rule, its metrics over all steps, and the sums behind them.
        kish: (R, 2, 3, K) raw and applied; n, Σw, Σw² by block.
        moments: of the surrogate gradients.
        unweighted: place of the rule that neither weighs nor rejects.
        num_steps: read.
        groups_per_batch: prompt groups of one optimizer step.
        notes: so far.
    """

    names: list[list[Setting]]
    rules: list[CorrectionRules]
    metrics: list[dict[str, float]]
    corrections: list[CorrectionSums[float]]
    kish: Floats
    moments: ScoreMoments
    unweighted: int
    num_steps: int
    groups_per_batch: float
    notes: tuple[str, ...]


def judge(judged: RankedSetting) -> Tradeoff:
    """Every rule's outcome, and the one to recommend."""
    used = judged.moments.counts[0] > 0
    drawn = draws(int(used.sum()))
    found = proxies(judged.moments, drawn, judged.unweighted, judged.groups_per_batch)
    groups, sequences, tokens = (int(total) for total in judged.moments.counts.sum(1))
    notes = list(judged.notes)
    if found is None:
        why = "no advantage differs from zero" if groups > 1 else "there is only one prompt group"
        notes.append(f"{why}: errors cannot be told, nothing is recommended")
    elif groups < FEW_GROUPS:
        notes.append(f"only {groups} prompt groups: intervals are rough (32 and more are better)")
    places = [place for place, named in enumerate(judged.names) if named]
    outcomes = _folded({place: _outcome(judged, place, found, drawn) for place in places})
    order = sorted(outcomes, key=lambda p: float(found.error[0, p]) if found else 0.0)
    plainest = min(outcomes, key=lambda p: float(found.plain_error[0, p])) if found else None
    return Tradeoff(
        outcomes=tuple(outcomes[place] for place in order),
        recommended=_recommend(outcomes, found) if found else None,
        plainest=None if plainest is None else outcomes[plainest].setting.name,
        num_steps=judged.num_steps,
        num_groups=groups,
        num_sequences=sequences,
        num_tokens=tokens,
        groups_per_batch=judged.groups_per_batch,
        trust=found.trust if found else 0.0,
        notes=tuple(notes),
    )


def _folded(outcomes: dict[int, SettingOutcome]) -> dict[int, SettingOutcome]:
    """Settings that do the same to these responses as one: the first, with the others' names."""
    firsts: dict[tuple[str, ...], int] = {}
    found: dict[int, SettingOutcome] = {}
    for place, outcome in outcomes.items():
        first = firsts.setdefault(outcome.figures(), place)
        if first == place:
            found[place] = outcome
        else:
            names = (*found[first].same_as, outcome.setting.name, *outcome.same_as)
            found[first] = replace(found[first], same_as=names)
    return found


def _outcome(judged: RankedSetting, place: int, found: Proxies | None, drawn: Floats) -> SettingOutcome:
    metrics, sums = judged.metrics[place], judged.corrections[place]
    used = judged.moments.counts[0] > 0
    units = sums.finite_tokens if judged.rules[place].weight.by_token else sums.finite_sequences
    beyond = 0.0
    if sums.weights is not None:
        below = 0.0 if judged.rules[place].weight.bound == "truncate" else sums.weights.below
        beyond = sums.weights.above + below
    prefix = "rollout_corr/"
    first, *others = judged.names[place]
    errors = _estimates(found, place) if found else (None, None, None)
    return SettingOutcome(
        setting=first,
        same_as=tuple(setting.name for setting in others),
        raw_ess=_ess(judged.kish[place, 0][:, used], drawn),
        applied_ess=_ess(judged.kish[place, 1][:, used], drawn),
        kept_tokens=1.0 - metrics[f"{prefix}rollout_rs_masked_fraction"],
        kept_sequences=1.0 - metrics[f"{prefix}rollout_rs_seq_masked_fraction"],
        max_weight=metrics.get(f"{prefix}rollout_is_max", 1.0) if sums.kept_tokens else 0.0,
        at_bound=ratio(beyond, units),
        saturated=ratio(metrics[f"{prefix}saturated_sequences"], sums.finite_sequences),
        error=errors[0],
        bias=errors[1],
        variance=errors[2],
        plain_error=float(found.plain_error[0, place]) if found else None,
    )


def _ess(kish: Floats, drawn: Floats) -> IntervalEstimate:
    """Kish's effective sample size over n from (3, K) sums, with its interval over blocks."""
    sums = drawn @ kish.T
    count, first, second = sums.T
    scale = count * second
    ess = np.divide(first**2, scale, out=np.zeros_like(first), where=scale > 0)
    low, high = interval(np.minimum(ess, 1.0))
    return IntervalEstimate(float(min(ess[0], 1.0)), float(low), float(high))


def _estimates(found: Proxies, place: int) -> tuple[IntervalEstimate, IntervalEstimate, IntervalEstimate]:
    def one(values: Floats) -> IntervalEstimate:
        low, high = interval(values[:, place])
        return IntervalEstimate(float(values[0, place]), float(low), float(high))

    return one(found.error), one(found.bias), one(found.variance)


def _recommend(outcomes: dict[int, SettingOutcome], found: Proxies) -> Recommendation:
    """Smallest upper end of the error's sampling interval; the run's own stays unless clearly beaten."""
    high = interval(found.error)[1]
    best = min(outcomes, key=lambda place: float(high[place]))
    outcome = outcomes[best]
    name = outcome.setting.name
    upper = f"the sampling interval of {name}'s gradient error has the smallest upper end, {high[best]:.3f}"
    own = next((p for p, o in outcomes.items() if o.setting.family == "run"), None)
    if own is None:
        return Recommendation(outcome.setting.name, outcome.setting.overrides, upper, None)
    if own == best:
        return Recommendation(outcome.setting.name, (), f"{upper}: keep what the run has", False)
    better = float((found.error[1:, best] < found.error[1:, own]).mean())
    saved = 1.0 - float(found.error[0, best] / found.error[0, own])
    against = (
        f"{upper}; it saves {saved:.0%} of the run's own error and is better in {better:.0%} of resamples"
    )
    if better < DECISIVE or saved < MATERIAL:
        why = f"{against}: too little to change anything, keep what the run has"
        return Recommendation(outcomes[own].setting.name, (), why, False)
    return Recommendation(outcome.setting.name, outcome.setting.overrides, against, True)
