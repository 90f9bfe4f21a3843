"""Rules about rewards, and about what is left to learn from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlctl.diagnose import remedies as remedy
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Finding, Remedy, Severity, Skipped, rule
from rlctl.diagnose.signals import change_evidence, crossing, longest_true, trend
from rlctl.diagnose.table import RunLog, Series, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCORE, BEST, WORST = "critic/score/mean", "critic/score/max", "critic/score/min"
_ERRORS = "reward/error_fraction"
#: Validation scores, one per data source.
VALIDATION = "val/<data_source>/reward_mean"


@rule(
    "dead-groups",
    "groups have both better and worse responses",
    needs=(th.ZERO_SPREAD.key,),
    uses=(SCORE, BEST, WORST),
    beside=lambda run: "the critic compares, not the siblings" if run.facts.has_critic else "",
)
def dead_groups(run: RunLog) -> Finding | Skipped | None:
    """Groups whose rewards are all equal teach nothing."""
    crossed = crossing(run.table.series(th.ZERO_SPREAD.key), th.ZERO_SPREAD)
    if crossed is None:
        return None
    steps, (score,) = run.table.aligned(SCORE)
    inside = (steps >= crossed.first_step) & (steps <= crossed.last_step)
    position = position_of(run.table, float(np.median(score[inside])) if inside.any() else None)
    severity: Severity = crossed.severity
    if position is None and _rises(run.table, SCORE) and _rises(run.table, th.ZERO_SPREAD.key):
        which, severity = "all right, it seems", "info"
        cause = "the mean reward rises along with their share: the policy solves more and more of its prompts"
    elif position is None:  # all right would be success, so this is no more than a warning
        which, cause, severity = "all right or all wrong", "the prompts are too easy or too hard", "warning"
    elif position >= th.LEARNED:  # success, not sickness: what is left to learn is elsewhere
        which, severity = "mostly all right", "info"
        cause = "the policy has learned these prompts: stop, or bring harder ones"
    elif position >= th.MOSTLY_RIGHT:
        which = "mostly all right"
        cause = "the prompts are too easy: filter those always solved, or bring harder ones"
    else:
        which = "mostly all wrong"
        cause = "the prompts are too hard, or the grader cannot read the answers: check some, start easier"
    return Finding(
        severity,
        f"{crossed.worst:.0%} of the groups have equal rewards, {which}: they teach nothing {crossed.where}",
        (crossed.evidence,),
        cause,
        th.ZERO_SPREAD.source,
        _contrast(run, which) if severity != "info" else (),
        "low" if position is None else "high",
        "the rewards that would tell right from wrong are not logged"
        if position is None
        else "the mean reward of these steps tells which",
        (f"{SCORE}, {BEST} and {WORST} would tell right from wrong",) if position is None else (),
    )


def _rises(table: Table, key: str) -> bool:
    found = trend(table.series(key))
    return found is not None and found.rises


def _contrast(run: RunLog, which: str) -> tuple[Remedy, ...]:
    """Prompts and groups in which right and wrong answers meet."""
    size = run.facts.group_size
    prompts = {
        "mostly all right": "leave out prompts that are always solved",
        "mostly all wrong": "begin with easier prompts; grade some stored answers by hand",
    }.get(which, "leave out prompts that are always or never solved")
    filtering = remedy.by_hand(
        prompts,
        verl="algorithm.filter_groups.enable=True",
        openrlhf="--algo.dynamic_filtering_enable",
    )
    larger = (remedy.change(f"rollout.n={2 * size}", why="larger groups"),) if size else ()
    return (*larger, filtering)


@rule("zero-reward", "something is rewarded", needs=(SCORE,), uses=(BEST, _ERRORS))
def zero_reward(run: RunLog) -> Finding | Skipped | None:
    """Not one response is ever rewarded."""
    best = run.table.series(BEST)
    steps, columns = run.table.aligned(SCORE, *((BEST,) if len(best) else ()))
    score = columns[0]
    start, length = longest_true(np.logical_and.reduce([column == 0.0 for column in columns]))
    if length < th.ZERO_REWARD_STEPS:
        return None
    first, last = int(steps[start]), int(steps[start + length - 1])
    evidence: tuple[Evidence, ...] = (Evidence(SCORE, f"exactly 0 on {length:,} steps", first, last),)
    errors = run.table.series(_ERRORS).values
    if len(errors):
        evidence += (Evidence(_ERRORS, f"{errors.mean():.1%} on average", first, last),)
    graded = remedy.by_hand("run the grader on stored rollouts")
    if (score[:start] > 0.0).any():
        cause = "the policy has collapsed: it was rewarded before"
        remedies: tuple[Remedy, ...] = (remedy.before(first), *remedy.calmer(run))
    else:
        cause = "the grader rejects everything: wrong answer format, wrong grader, or a task beyond the model"
        other = run.spec is not None and run.spec.reward.terms is None and run.spec.reward.name != "auto"
        auto = (remedy.change("reward.name=auto", why="the grader that the data names"),) if other else ()
        remedies = (graded, *auto)
    return Finding(
        "critical",
        f"every reward is exactly 0 for {length:,} steps",
        evidence,
        cause,
        th.FIELD,
        remedies,
        "high" if len(best) else "medium",
        "the best single reward is 0 too" if len(best) else "the best single reward is not logged",
        () if len(best) else (f"{BEST} would rule out rewards that average 0",),
    )


@rule(
    "entropy",
    "the policy explores until it has learned",
    needs=(th.ENTROPY.key,),
    uses=(SCORE, BEST, WORST),
)
def entropy(run: RunLog) -> Finding | Skipped | None:
    """The policy stops exploring before it has learned."""
    if has_learned(run.table):
        return None  # sure of itself because it is right
    series = run.table.series(th.ENTROPY.key)
    crossed = crossing(series, th.ENTROPY)
    if crossed is not None:
        what, evidence = f"entropy is {crossed.worst:.2g} nats {crossed.where}", crossed.evidence
    elif (fall := _halved_for_nothing(run.table)) is not None:
        start, end = fall
        what = f"entropy fell from {start:.3g} to {end:.3g} nats while the reward stayed where it was"
        figure = f"{end / start:.0%} of its start"
        evidence = Evidence(th.ENTROPY.key, figure, int(series.steps[0]), int(series.steps[-1]))
    else:
        return None
    knows_reward = len(run.table.series(SCORE)) > 0
    return Finding(
        "warning",
        what,
        (evidence,),
        "exploration is gone: responses to a prompt are nearly alike and have little to learn from",
        th.ENTROPY.source,
        _explore(run),
        "medium" if knows_reward else "low",
        "the policy has not learned its prompts, so that it is not sure with reason"
        if knows_reward
        else "without the reward a sure policy may be a good one",
        () if knows_reward else (f"{SCORE} would tell whether the policy is sure with reason",),
    )


def _explore(run: RunLog) -> tuple[Remedy, ...]:
    """A higher upper clip, the model's own temperature; what the run has already is left out."""
    spec = run.spec
    clips = spec is None or spec.algorithm.rollout_correction.loss_type == "ppo_clip"
    high = (spec.actor.clip_ratio_high or spec.actor.clip_ratio) if spec else 0.0
    higher = remedy.change(
        "actor.clip_ratio_high=0.28", why="clip-higher (DAPO)", openrlhf="--actor.eps_clip_low_high 0.2 0.28"
    )
    warmer = spec is None or spec.rollout.temperature < 1.0
    return (
        *((higher,) if clips and high < 0.28 else ()),
        *((remedy.change("rollout.temperature=1.0"),) if warmer else ()),
        remedy.slower(run),
    )


@rule(
    "reward-hacking",
    "validation gains with the training reward",
    needs=(SCORE, VALIDATION),
    uses=(BEST, WORST),
    min_steps=th.VAL_MIN,
)
def reward_hacking(run: RunLog) -> Finding | Skipped | None:
    """The training reward rises and validation does not."""
    validation, span = validation_of(run.table), reward_span(run.table)
    if span is None:
        return Skipped("the rewards' range is not logged", (BEST, WORST))
    steps, (score,) = run.table.aligned(SCORE)
    if len(validation) < th.VAL_MIN or len(score) < 2 * th.WINDOW:
        return Skipped("too few steps, or data sources that are never validated together", (VALIDATION,))
    size = span[1] - span[0]
    before, after = ends(validation.values, th.VAL_ENDS)
    start, end = ends(score, _end_of(score))
    gain, held_out = (end - start) / size, (after - before) / size
    # Near the top there is nothing to gain, and some wandering; not that much of a fall.
    had_learned = (before - span[0]) / size >= th.LEARNED and held_out > -th.HACKING_GAP[0][1]
    if gain < th.FLAT_REWARD or held_out >= th.FLAT_REWARD or had_learned:
        return None
    reached: list[Severity] = [severity for severity, gap in th.HACKING_GAP if gain - held_out > gap]
    if not reached:
        return None
    return Finding(
        reached[-1],
        f"the training reward gained {gain:.0%} of its range, validation {held_out:.0%}",
        (
            change_evidence(SCORE, start, end, steps),
            change_evidence(VALIDATION, before, after, validation.steps),
        ),
        "the policy learns to please the grader, or learns the training prompts by heart",
        th.OWN,
        (
            remedy.by_hand("read the best rewarded responses (`rollouts/` of the run), and mend the grader"),
            remedy.slower(run),
        ),
        "medium",
        "both ends of the run are compared, in shares of the reward's range",
    )


def position_of(table: Table, score: float | None) -> float | None:
    """Where a mean reward lies between the worst (0) and the best (1) single reward of the run."""
    span = reward_span(table)
    return None if score is None or span is None else (score - span[0]) / (span[1] - span[0])


def reward_span(table: Table) -> tuple[float, float] | None:
    """The worst and the best single reward of the run; None where they are not logged, or equal."""
    best, worst = table.series(BEST).values, table.series(WORST).values
    if len(best) == 0 or len(worst) == 0 or best.max() <= worst.min():
        return None
    return float(worst.min()), float(best.max())


def has_learned(table: Table) -> bool:
    """Whether the newest mean rewards are near the best there is."""
    score = table.series(SCORE).values
    position = position_of(table, float(np.median(score[-th.WINDOW :])) if len(score) else None)
    return position is not None and position >= th.LEARNED


def has_gained(table: Table, since: int) -> bool:
    """Whether the mean reward rose since a step, by more than counts as flat."""
    steps, (score,) = table.aligned(SCORE)
    score = score[steps >= since]
    if len(score) < 2 * th.MIN_STEPS:
        return False
    before, after = (position_of(table, end) for end in ends(score, min(th.WINDOW, len(score) // 2)))
    return before is not None and after is not None and after - before >= th.FLAT_REWARD


def validation_of(table: Table) -> Series:
    """The mean over data sources of the validation score, at the steps where all were validated."""
    steps, columns = table.aligned(*validation_keys(table))
    return Series(steps, np.mean(columns, axis=0))


def validation_keys(table: Table) -> tuple[str, ...]:
    """The validation scores that were logged, one per data source."""
    prefix, suffix = VALIDATION.split("<data_source>")
    return tuple(sorted(key for key in table.columns if key.startswith(prefix) and key.endswith(suffix)))


def ends(values: NDArray[np.float64], width: int) -> tuple[float, float]:
    """Median of the first and of the last `width` values."""
    return float(np.median(values[:width])), float(np.median(values[-width:]))


def _end_of(values: NDArray[np.float64]) -> int:
    """How many values make up either end of a long series."""
    return max(th.WINDOW, int(th.ENDS_SHARE * len(values)))


def _halved_for_nothing(table: Table) -> tuple[float, float] | None:
    """Entropy at both ends of the run, if it halved while the reward gained next to nothing."""
    steps, (values, score) = table.aligned(th.ENTROPY.key, SCORE)
    if len(steps) < th.ENTROPY_STEPS:
        return None
    start, end = ends(values, _end_of(values))
    before, after = ends(score, _end_of(score))
    first, last = position_of(table, before), position_of(table, after)
    if first is None or last is None or last - first >= th.FLAT_REWARD or end > th.ENTROPY_SHARE * start:
        return None
    return start, end


RULES = (
    dead_groups,
    zero_reward,
    entropy,
    reward_hacking,
)
