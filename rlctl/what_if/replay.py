"""Evaluates a grid of settings in one pass over dumped rollouts, and recommends one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rlctl.algos.rules import CorrectionRules
from rlctl.errors import UsageError
from rlctl.what_if.dumps import Step
from rlctl.what_if.gradient_error import errors, interval
from rlctl.what_if.setting_sums import Floats, SettingSums, advantages_of, pooled
from rlctl.what_if.settings import Setting
from rlctl.what_if.tradeoff import IntervalEstimate, Recommendation, SettingOutcome, Tradeoff

#: A setting replaces the run's own only if it is better in at least this share of resamples, and by at least
#: this share of the run's own error: the difference must be both certain and relevant.
DECISIVE, MATERIAL = 0.95, 0.05
#: With fewer groups, intervals are rough.
FEW_GROUPS = 32


def replay(
    steps: Iterable[Step],
    settings: Sequence[Setting],
    *,
    estimator: str = "rloo",
    groups_per_batch: int | None = None,
    mean_per_sequence: bool = False,
) -> Tradeoff:
    """Evaluates every setting on every step.

    Weights are normalised by their mean over a mini-batch. A dump often contains only a few rows per step, so
    consecutive steps are pooled until they contain as many groups as a mini-batch.

    Args:
        steps: read once; only the steps of one pool are in memory.
        settings: with unique names; equal rules are computed once.
        estimator: the run's `algorithm.adv_estimator`; computes the advantages if the dump has none.
        groups_per_batch: prompt groups of one optimizer step; None: the mean number per dumped step.
        mean_per_sequence: whether the loss first averages over the tokens of each sequence.

    Raises:
        UsageError: no response has finite log-probs of both policies.
    """
    named: dict[CorrectionRules, list[Setting]] = {}
    for setting in settings:
        named.setdefault(setting.rules, []).append(setting)
    sums = SettingSums([*named])
    all_notes = list[str]()
    num_steps = 0

    def with_advantages() -> Iterator[Step]:
        nonlocal num_steps
        for step in steps:
            advantages = advantages_of(step, estimator, all_notes)
            if mean_per_sequence:
                advantages = advantages / np.maximum(step.lengths, 1)
            num_steps += 1
            yield replace(step, advantages=advantages)

    for batch in pooled(with_advantages(), groups_per_batch or 1):
        sums.add(batch)
    num_groups, num_sequences, num_tokens = (int(total) for total in sums.counts.sum(1))
    if not num_sequences:
        raise UsageError("the dump contains no response with finite log-probs of both policies")
    batch_groups = groups_per_batch or num_groups / num_steps
    advantages = errors(sums, batch_groups)
    notes = list(dict.fromkeys(all_notes))
    differs = False
    if advantages is None:
        why = "no advantage differs from zero" if num_groups > 1 else "there is only one prompt group"
        notes.append(f"{why}: errors cannot be estimated, nothing is recommended")
    elif not (differs := bool(np.ptp(advantages[0]) > MATERIAL * advantages[0].min())):
        notes.append("no setting differs on these responses: trainer and engine give them the same log-probs")
    elif num_groups < FEW_GROUPS:
        notes.append(f"only {num_groups} prompt groups: intervals are rough (32 and more are better)")
    outcomes = _folded(
        {index: _outcome(sums, own, index, advantages) for index, own in enumerate(named.values())}
    )
    order = sorted(outcomes, key=lambda p: 0.0 if advantages is None else float(advantages[0, p]))
    return Tradeoff(
        outcomes=tuple(outcomes[place] for place in order),
        recommended=_recommend(outcomes, advantages) if advantages is not None and differs else None,
        num_steps=num_steps,
        num_groups=num_groups,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        groups_per_batch=batch_groups,
        notes=tuple(notes),
    )


def _folded(outcomes: dict[int, SettingOutcome]) -> dict[int, SettingOutcome]:
    """Merges settings with identical results on these responses into the first, with the names of all."""
    firsts: dict[tuple[str, ...], int] = {}
    folded: dict[int, SettingOutcome] = {}
    for place, outcome in outcomes.items():
        first = firsts.setdefault(outcome.figures, place)
        if first == place:
            folded[place] = outcome
        else:
            names = (*folded[first].same_as, outcome.setting.name, *outcome.same_as)
            folded[first] = replace(folded[first], same_as=names)
    return folded


def _outcome(
    sums: SettingSums, named: list[Setting], index: int, errors_of_draws: Floats | None
) -> SettingOutcome:
    (num, *raw), (_, *applied) = sums.kish[index]
    kept_tokens, kept_sequences = sums.kept[index] / sums.graded
    return SettingOutcome(
        setting=named[0],
        same_as=tuple(setting.name for setting in named[1:]),
        raw_ess=_ess(num, *raw),
        applied_ess=_ess(num, *applied),
        kept_tokens=float(kept_tokens),
        kept_sequences=float(kept_sequences),
        max_weight=float(sums.largest[index]),
        at_bound=float(sums.beyond[index] / num),
        error=None if errors_of_draws is None else _estimate(errors_of_draws[:, index]),
    )


def _ess(count: float, first: float, second: float) -> float:
    """Kish's effective sample size divided by n, from n, Σw and Σw²."""
    return min(float(first**2 / (count * second)), 1.0) if second > 0.0 else 0.0


def _estimate(values: Floats) -> IntervalEstimate:
    """Converts (R,) values, first of the sample, then of its resamples, to an estimate with an interval."""
    low, high = interval(values)
    return IntervalEstimate(float(values[0]), float(low), float(high))


def _recommend(outcomes: dict[int, SettingOutcome], errors_of_draws: Floats) -> Recommendation:
    """Recommends the setting whose error interval has the smallest upper end, or the run's own setting.

    The run's own setting is kept unless the other one is better by `DECISIVE` and `MATERIAL`.
    """
    high = interval(errors_of_draws)[1]
    best = min(outcomes, key=lambda place: float(high[place]))
    chosen = outcomes[best].setting
    name = chosen.name
    upper = f"the sampling interval of {name}'s gradient error has the smallest upper end, {high[best]:.3f}"
    own = next((p for p, o in outcomes.items() if o.setting.family == "run"), None)
    if own is None:
        return Recommendation(name, chosen.overrides, upper)
    if own == best:
        return Recommendation(name, (), f"{upper}: keep the run's setting")
    better = float((errors_of_draws[1:, best] < errors_of_draws[1:, own]).mean())
    saved = 1.0 - float(errors_of_draws[0, best] / errors_of_draws[0, own])
    against = (
        f"{upper}; it saves {saved:.1%} of the run's own error and is better in {better:.0%} of resamples"
    )
    if better < DECISIVE or saved < MATERIAL:
        why = f"{against}: too small a gain; keep the run's setting"
        return Recommendation(outcomes[own].setting.name, (), why)
    return Recommendation(name, chosen.overrides, against)
