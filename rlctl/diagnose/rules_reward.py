"""Rules about rewards, about what is left to learn from them, and about the length of responses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Fix, Severity, Skipped
from rlctl.diagnose.reward_range import (
    BEST,
    LEARNED,
    MOSTLY_RIGHT,
    SCORE,
    VALIDATION,
    WORST,
    ends,
    has_learned,
    position_of,
    reward_span,
    validation_of,
    width_of_ends,
)
from rlctl.diagnose.rule import Detection, Rule, detect_crossing
from rlctl.diagnose.signals import change_evidence, crossing, longest_true, trend
from rlctl.diagnose.table import RunLog, Table
from rlctl.diagnose.thresholds import Levels

_ERRORS, _LENGTH = "reward/error_fraction", "response_length/mean"
ZERO_REWARD_STEPS = 20
ENTROPY = Levels("actor/entropy", (("warning", 0.01),), is_floor=True)
#: Entropy that fell to this share of its start, over at least so many steps.
ENTROPY_SHARE, ENTROPY_STEPS = 0.5, 40
#: Validations that make up either end of a run, and those needed at least.
VAL_ENDS, VAL_MIN = 2, 4
#: Gain of the training reward minus gain of the validation reward, in shares of the reward's range.
HACKING_GAP: tuple[tuple[Severity, float], ...] = (("warning", 0.15), ("critical", 0.30))
TRUNCATED = Levels("response_length/clip_ratio", (("info", 0.05), ("warning", 0.1), ("critical", 0.3)))
#: Responses that got longer by this factor while validation gained less than `FLAT_REWARD`.
LENGTH_GROWTH = 1.5


@Rule(
    "dead-groups", source=th.FIELD, cause="the prompts are too easy or too hard",
    needs=(th.ZERO_SPREAD.key,), uses=(SCORE, BEST, WORST),
    signal="`reward/zero_spread_groups`; reports whether all are right or all wrong",
    thresholds="learned³ / > 0.5 / > 0.75, where the rewards show that it is not learned",
    sure=("high", "the mean reward of these steps shows which"),
    not_applicable=lambda run: "the critic gives the baseline, not the group" if run.facts.has_critic else "",
)  # fmt: skip
def dead_groups(run: RunLog) -> Detection | None:
    """Groups contain better and worse responses."""
    crossed = crossing(run.table.series(th.ZERO_SPREAD.key), th.ZERO_SPREAD)
    if crossed is None:
        return None
    steps, (score,) = run.table.aligned(SCORE)
    inside = (steps >= crossed.first_step) & (steps <= crossed.last_step)
    position = position_of(run.table, float(np.median(score[inside])) if inside.any() else None)
    severity, cause, filtering = crossed.severity, None, "filter out prompts that are always or never solved"
    if position is None and _rises(run.table, SCORE) and _rises(run.table, th.ZERO_SPREAD.key):
        which, severity = "probably all right", "info"
        cause = "the mean reward rises with their share: the policy solves more and more of its prompts"
    elif position is None:  # all right would be success, so this is no more than a warning
        which, severity = "all right or all wrong", "warning"
    elif position >= LEARNED:
        which, severity = "mostly all right", "info"
        cause = "the policy has learned these prompts: stop, or add harder ones"
    elif position >= MOSTLY_RIGHT:
        which, filtering = "mostly all right", "filter out prompts that are always solved"
        cause = "the prompts are too easy: filter out those that are always solved, or add harder ones"
    else:
        which = "mostly all wrong"
        filtering = "begin with easier prompts; grade some stored answers by hand"
        cause = "the prompts are too hard, or the grader cannot parse the answers: check some, start easier"
    filtered = fix.by_hand(
        filtering, verl="algorithm.filter_groups.enable=True", openrlhf="--algo.dynamic_filtering_enable"
    )
    unknown = ("low", "the rewards that would separate right from wrong are not logged")
    return Detection(
        severity,
        f"{crossed.worst:.0%} of the groups have equal rewards, {which}: no gradient {crossed.where}",
        (crossed.evidence,),
        cause,
        (*fix.larger_groups(run), filtered) if severity != "info" else (),
        unknown if position is None else None,  # type: ignore[arg-type]
        (f"{SCORE}, {BEST} and {WORST} would separate right from wrong",) if position is None else (),
    )


def _rises(table: Table, key: str) -> bool:
    found = trend(table.series(key))
    return found is not None and found.rises


@Rule(
    "zero-reward", signal="every reward exactly 0", source=th.FIELD,
    sure=("high", "the best single reward is 0 too"), needs=(SCORE,), uses=(BEST, _ERRORS),
    thresholds=f"— / — / {ZERO_REWARD_STEPS} steps in a row",
    cause="the grader rejects everything: wrong answer format, wrong grader, or a task beyond the model",
)  # fmt: skip
def zero_reward(run: RunLog) -> Detection | None:
    """Some responses are rewarded."""
    has_best = len(run.table.series(BEST)) > 0
    steps, columns = run.table.aligned(SCORE, *((BEST,) if has_best else ()))
    start, length = longest_true(np.logical_and.reduce([column == 0.0 for column in columns]))
    if length < ZERO_REWARD_STEPS:
        return None
    first, last = int(steps[start]), int(steps[start + length - 1])
    evidence: tuple[Evidence, ...] = (Evidence(SCORE, f"exactly 0 on {length:,} steps", first, last),)
    errors = run.table.series(_ERRORS).values
    if len(errors):
        evidence += (Evidence(_ERRORS, f"{errors.mean():.1%} on average", first, last),)
    if (columns[0][:start] > 0.0).any():
        cause: str | None = "the policy has collapsed: earlier steps were rewarded"
        fixes: tuple[Fix, ...] = (fix.resume_before(first), *fix.calmer(run))
    else:
        other = run.spec is not None and run.spec.reward.terms is None and run.spec.reward.name != "auto"
        auto = (fix.change("reward.name=auto", why="the grader that the data names"),) if other else ()
        cause, fixes = None, (fix.by_hand("run the grader on stored rollouts"), *auto)
    return Detection(
        "critical",
        f"every reward is exactly 0 for {length:,} steps",
        evidence,
        cause,
        fixes,
        None if has_best else ("medium", "the best single reward is not logged"),
        () if has_best else (f"{BEST} would exclude rewards that average 0",),
    )


def _explore(run: RunLog) -> tuple[Fix, ...]:
    """A higher upper clip, a temperature of 1; what the run has already is left out."""
    spec = run.spec
    clips = spec is None or spec.algorithm.rollout_correction.loss_type == "ppo_clip"
    high = (spec.actor.clip_ratio_high or spec.actor.clip_ratio) if spec else 0.0
    higher = fix.change(
        "actor.clip_ratio_high=0.28", why="clip-higher (DAPO)", openrlhf="--actor.eps_clip_low_high 0.2 0.28"
    )
    warmer = spec is None or spec.rollout.temperature < 1.0
    return (
        *((higher,) if clips and high < 0.28 else ()),
        *((fix.change("rollout.temperature=1.0"),) if warmer else ()),
        fix.slower(run),
    )


@Rule(
    "entropy", signal="`actor/entropy`, unless learned³", source=th.FIELD, fixes=_explore,
    needs=(ENTROPY.key,), uses=(SCORE, BEST, WORST),
    thresholds="— / < 0.01, or halved while the reward stays flat / —",
    cause="exploration has ended: responses to a prompt are nearly alike, so groups have little to compare",
    sure=("medium", "the policy has not learned its prompts, so the low entropy is not success"),
)  # fmt: skip
def entropy(run: RunLog) -> Detection | None:
    """The policy explores until it has learned."""
    if has_learned(run.table):
        return None
    found = detect_crossing(run, ENTROPY, "entropy is {worst:.2g} nats {where}")
    if found is None and (fall := _halved_while_flat(run.table)) is not None:
        steps = run.table.series(ENTROPY.key).steps
        what = f"entropy fell from {fall[0]:.3g} to {fall[1]:.3g} nats while the reward stayed flat"
        figure = f"{fall[1] / fall[0]:.0%} of its start"
        found = Detection("warning", what, (Evidence(ENTROPY.key, figure, int(steps[0]), int(steps[-1])),))
    if found is None:
        return None
    found = replace(found, severity="warning")
    if len(run.table.series(SCORE)):
        return found
    return replace(
        found,
        sure=("low", "without the reward, low entropy may be success"),
        could_not_check=(f"{SCORE} would show whether the policy has learned",),
    )


def _halved_while_flat(table: Table) -> tuple[float, float] | None:
    """Entropy at both ends of the run, if it halved while the reward gained next to nothing."""
    steps, (values, score) = table.aligned(ENTROPY.key, SCORE)
    if len(steps) < ENTROPY_STEPS:
        return None
    start, end = ends(values, width_of_ends(values))
    first, last = (position_of(table, one) for one in ends(score, width_of_ends(score)))
    if first is None or last is None or last - first >= th.FLAT_REWARD or end > ENTROPY_SHARE * start:
        return None
    return start, end


@Rule(
    "reward-hacking", thresholds="— / > 0.15 / > 0.30", source=th.OWN, needs=(SCORE, VALIDATION),
    uses=(BEST, WORST), min_steps=VAL_MIN,
    signal="gain of the training reward minus gain in validation, in shares of the reward's range, where "
    "validation is flat and not near the top, or falls (from the top by 15 %)",
    cause="the policy exploits the grader, or memorizes the training prompts",
    fixes=lambda run: (
        fix.by_hand("read the best rewarded responses (`rollouts/` of the run), and correct the grader"),
        fix.slower(run),
    ),
    sure=("medium", "both ends of the run are compared, in shares of the reward's range"),
)  # fmt: skip
def reward_hacking(run: RunLog) -> Detection | Skipped | None:
    """Validation gains with the training reward."""
    validation, span = validation_of(run.table), reward_span(run.table)
    if span is None:
        return Skipped("the rewards' range is not logged", (BEST, WORST))
    steps, (score,) = run.table.aligned(SCORE)
    if len(validation) < VAL_MIN or len(score) < 2 * th.WINDOW:
        return Skipped("too few steps, or data sources that are never validated together", (VALIDATION,))
    size = span[1] - span[0]
    before, after = ends(validation.values, VAL_ENDS)
    start, end = ends(score, width_of_ends(score))
    gain, held_out = (end - start) / size, (after - before) / size
    # Near the top there is nothing to gain, and some variation; a fall of that size is more than variation.
    had_learned = (before - span[0]) / size >= LEARNED and held_out > -HACKING_GAP[0][1]
    reached = [severity for severity, gap in HACKING_GAP if gain - held_out > gap]
    if gain < th.FLAT_REWARD or held_out >= th.FLAT_REWARD or had_learned or not reached:
        return None
    return Detection(
        reached[-1],
        f"the training reward gained {gain:.0%} of its range, validation {held_out:.0%}",
        (
            change_evidence(SCORE, start, end, steps),
            change_evidence(VALIDATION, before, after, validation.steps),
        ),
    )


def _length_penalty(run: RunLog) -> tuple[Fix, ...]:
    """A reward that falls towards the limit (DAPO, section 3.4), unless there is one."""
    limit, spec = run.facts.max_response_length, run.spec
    if not limit or limit < 8 or (spec is not None and spec.reward.overlong.buffer_length > 0):
        return ()
    return (
        fix.change(
            f"reward.overlong.buffer_length={limit // 4}",
            why="a penalty that grows towards the limit",
            trl="mask_truncated_completions=True",
        ),
    )


def _higher_limit(run: RunLog) -> Fix:
    limit = run.facts.max_response_length
    if limit:
        return fix.change(f"data.max_response_length={2 * limit}")
    return fix.by_hand(
        "raise the length limit",
        verl="data.max_response_length",
        trl="max_completion_length",
        openrlhf="--rollout.max_new_tokens",
    )


@Rule(
    "truncated", signal="`response_length/clip_ratio`", thresholds=TRUNCATED, source=th.FIELD,
    needs=(TRUNCATED.key,),
    cause="the limit is too short for the task, or the policy no longer ends its responses",
    fixes=lambda run: (_higher_limit(run), *_length_penalty(run)),
    sure=("medium", "too short a limit and responses that never end have the same effect on this figure"),
)  # fmt: skip
def truncated(run: RunLog) -> Detection | None:
    """Responses end before the length limit."""
    return detect_crossing(
        run, TRUNCATED, "{worst:.1%} of the responses are cut off at the length limit {where}"
    )


def _per_token(run: RunLog) -> tuple[Fix, ...]:
    if run.spec is not None and run.spec.actor.loss_agg_mode == "token-mean":
        return ()
    return (fix.change("actor.loss_agg_mode=token-mean", trl="loss_type=dapo"),)


@Rule(
    "length-growth", thresholds="— / both / —", source=th.FIELD, needs=(_LENGTH, VALIDATION),
    uses=(SCORE, BEST, WORST), min_steps=VAL_MIN,
    signal="`response_length/mean` rises by half and validation does not gain",
    cause="the loss or reward favours length: with a mean per response, long wrong answers cost little",
    fixes=lambda run: (*_per_token(run), *_length_penalty(run)),
    sure=("medium", "the length has no benefit; the log does not show what rewards it"),
)  # fmt: skip
def length_growth(run: RunLog) -> Detection | Skipped | None:
    """Longer responses improve validation."""
    series, span = run.table.series(_LENGTH), reward_span(run.table)
    if span is None:
        return Skipped("the rewards' range is not logged", (BEST, WORST))
    rise = trend(series)
    if rise is None or not rise.rises or rise.end < LENGTH_GROWTH * rise.start:
        return None
    validation = validation_of(run.table)
    if len(validation) < VAL_MIN:
        return Skipped("data sources are never validated together", (VALIDATION,))
    before, after = ends(validation.values, VAL_ENDS)
    if (after - before) / (span[1] - span[0]) >= th.FLAT_REWARD:
        return None
    return Detection(
        "warning",
        f"responses got {rise.end / rise.start - 1:.0%} longer and validation did not gain",
        (
            change_evidence(_LENGTH, rise.start, rise.end, series.steps),
            change_evidence(VALIDATION, before, after, validation.steps),
        ),
    )


RULES = (dead_groups, zero_reward, entropy, reward_hacking, truncated, length_growth)
