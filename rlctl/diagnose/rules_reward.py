"""Rules about rewards, their learning signal, entropy, and the length of responses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.falls import fall_of, is_new_level
from rlctl.diagnose.finding import Evidence, Fix, Severity, Skipped, Sure
from rlctl.diagnose.rule import Detection, Rule, detect_crossing
from rlctl.diagnose.rules_update import LARGE_UPDATE, largest_update
from rlctl.diagnose.signals import (
    Change,
    change_evidence,
    crossing,
    evidence_over,
    is_frequent,
    lasting_change,
    longest_true,
    rises,
)
from rlctl.diagnose.table import COUNTED, RunLog, Series, Table, ends
from rlctl.metric_names import OVERLONG, key_pattern

_ERRORS = "reward/error_fraction"
ZERO_REWARD_STEPS = 20
#: Fall of the reward, as a share of its range; share of the best level that counts as all of it, and share
#: that counts where the range is unknown.
FALL: tuple[tuple[Severity, float], ...] = (("warning", 0.15), ("critical", 0.3))
ALL_LOST, HALF_LOST = 0.9, 0.5
#: Steps within which a fall began with the first updates: small ones, which a lower rate would only delay.
FIRST_UPDATES = 10
_WRONG_DIRECTION = (
    "updates make the policy worse from the first on, and none is large: the sign of the advantages or of a "
    "term of the loss is wrong, or rewards belong to other responses"
)
_CHECK_THE_DIRECTION = (
    fix.by_hand(
        "train on one batch again and again, without KL and entropy terms: its well rewarded responses must "
        "become likelier"
    ),
    fix.by_hand(
        "keep rollouts (`trainer.rollouts_per_step=-1`): diagnose compares rewards of equal responses"
    ),
    fix.by_hand("if the direction is right, single batches are too noisy: enlarge them, or lower the rate"),
)
#: Single rewards of a sum; rows below which a change counts only if every row shows it, and fewest rows; rise
#: of one, as a share of its largest value, and fall of another, as a share of its start.
_TERM, TERM_ROWS, FEWEST_ROWS, TERM_MOVE, TERM_LOSS = "reward/<term>/mean", 15, 3, 0.2, 0.4
#: Names of rewards for the form of a response.
_FORMAT = re.compile(r"format|pars(?:e|ing|able)|tags?\b|xml", re.IGNORECASE)
#: Temperatures above and below which samples are random, and all the same.
HOT, COLD = 1.4, 0.6
_TOO_COLD = "samples of a prompt are nearly equal, so they give little to compare"
#: Metric → its value if every reward is 0, not only their mean.
_ALL_ZERO = {
    th.BEST: 0.0,
    th.GROUP_STD: 0.0,
    th.ZERO_SPREAD.key: 1.0,
    "critic/advantages/max": 0.0,
    "critic/advantages/mean": 0.0,
    "actor/pg_loss": 0.0,
}
#: Metric → its value if all rewards of a prompt are the same; None: the reward itself.
_NO_SPREAD = {th.WORST: None, th.GROUP_STD: 0.0, th.ZERO_SPREAD.key: 1.0}
#: Share of its start that entropy falls to, and minimum number of steps.
ENTROPY_SHARE, ENTROPY_STEPS = 0.5, 40
#: Share of right groups among the equal ones up to which they are mostly wrong, where single rewards are not
#: logged; from 1 minus it they are mostly right.
MOSTLY_WRONG = 0.3
#: Mean reward, as a share of its range, below which larger groups find no right answer either.
NEARLY_NONE = 0.1
#: Coefficient of an entropy bonus that works from the first step on; advantages have a spread of about 1.
STRONG_BONUS = 0.01
#: Factor by which entropy grows, without and with an entropy bonus, and nats that it exceeds.
ENTROPY_RISE, ENTROPY_NATS = (2.0, 1.5), 1.0
#: Steps that a run must cover for a constant reward to be a fault, where the rewards' range is known and
#: where it is not; minimum number of logged rows.
FLAT_STEPS, FLAT_STEPS_UNKNOWN, FLAT_ROWS = 500, 1000, 4
#: Interval of logged rows above which a log counts tokens or samples instead of steps: then a row is a step.
LONGEST_INTERVAL = 1000
#: A reward that grew by this factor is not flat, even if it is small.
FLAT_GROWTH = 1.25
#: Number of validations in each end of a run, and minimum number of validations.
VAL_ENDS, VAL_MIN = 2, 4
#: Gain of the training reward minus gain of the validation reward, in shares of the reward's range.
HACKING_GAP: tuple[tuple[Severity, float], ...] = (("warning", 0.15), ("critical", 0.30))
#: Mean length, as a share of the limit, at which every response has reached it; share of the responses that
#: is nearly all of them.
AT_LIMIT = 0.995
NEARLY_ALL = 0.9
#: Share of responses that are cut off, from which equal rewards and a reward that falls are its consequence.
MOSTLY_CUT = 0.5
#: The same, below which responses end by themselves.
FEW_CUT = 0.1
#: Share of the steps on which every response is cut off.
ALL_TRUNCATED: tuple[tuple[Severity, float], ...] = (("warning", 0.05), ("critical", 0.3))


@Rule(
    "reward-fell",
    one_of=(th.SCORE, th.VALIDATION),
    uses=(th.BEST, th.WORST),
    min_steps=th.MIN_STEPS,
    thresholds=f"— / {FALL[0][1]:.0%} of the rewards' range, or half of the best where that is unknown / "
    f"{FALL[1][1]:.0%}, or nearly all of at least {FALL[0][1]:.0%}",
)
def reward_fell(run: RunLog) -> Detection | None:
    """The reward does not fall from its best."""
    series = run.table.series(th.SCORE)
    is_training = len(series) >= th.MIN_STEPS
    if not is_training:
        series = run.validation
    fall = fall_of(series) if len(series) >= th.MIN_STEPS else None
    if fall is None:
        return None
    best, last, since = fall
    if not is_new_level(series.values, best, last):
        return None
    span = run.likely_span
    if not is_training:
        span = (0.0, 1.0) if last >= 0.0 and best <= 1.0 else None
    severity = _severity_of_fall(best, last, span, lowest=float(series.values.min()))
    if severity is None:
        return None
    name = "reward" if is_training else "validation score"
    key = th.SCORE if is_training else th.VALIDATION
    detection = Detection(
        severity=severity,
        what=f"the {name} fell from {best:.2g} to {last:.2g} after step {since:,}",
        evidence=(change_evidence(key, best, last, series.steps[series.steps >= since]),),
        fixes=(*fix.slower(run, 10.0), fix.resume_before(since + 1)),
        since=since + 1,
    )
    halfway = series.steps[(series.steps > since) & (series.values <= (best + last) / 2.0)]
    largest = largest_update(run, int(halfway[0])) if len(halfway) else None
    is_usual = largest is not None and largest < LARGE_UPDATE[0][1]
    if is_training and is_usual and run.has_first_step and series.steps[0] + FIRST_UPDATES > since:
        what = f"{detection.what}, by updates of at most {largest:.2g} nats per token and batch"
        detection = replace(detection, what=what, cause=_WRONG_DIRECTION, fixes=_CHECK_THE_DIRECTION)
    return _doubted(run, detection)


def _severity_of_fall(
    best: float, last: float, span: tuple[float, float] | None, *, lowest: float
) -> Severity | None:
    """Of a fall between two levels of a reward; None: it is too small.

    Args:
        span: range of the reward; None: unknown.
        lowest: value of the series.
    """
    if span is None:
        size = best - min(0.0, lowest)
        return "warning" if best - last >= HALF_LOST * size else None
    floor, top = span
    share = (best - last) / (top - floor)
    reached = [severity for severity, least in FALL if share >= least]
    if not reached:
        return None
    is_all_lost = best - last >= ALL_LOST * (best - floor)
    return FALL[-1][0] if is_all_lost else reached[-1]


@Rule(
    "zero-spread-groups",
    one_of=(th.ZERO_SPREAD.key, th.GROUP_STD),
    uses=th.REWARDS,
    not_applicable=lambda run: "the critic gives the baseline, not the group" if run.facts.has_critic else "",
)
def zero_spread_groups(run: RunLog) -> Detection | None:
    """Groups contain better and worse responses."""
    groups = _equal_groups(run)
    if groups is None:
        return None
    steps, (score,) = run.table.aligned(th.SCORE)
    during = score[np.isin(steps, groups.steps)]
    usual = float(np.median(during)) if len(during) else None
    position = run.reward_position(usual)
    if position is None and len(during) > 1 and (during == usual).mean() >= NEARLY_ALL:
        detection = Detection(
            severity="warning",
            what=groups.message(f"all of {usual:g}"),
            evidence=(groups.evidence,),
            cause="the grader gives one number on these steps",
            fixes=fix.other_grader(run),
            since=groups.since,
        )
        return _doubted(run, detection)
    meaning = _meaning_of_equal_groups(run, groups, position)
    severity = meaning.severity or groups.severity
    if severity == "critical" and position and not run.reward_span:  # the range is an assumption
        severity = "warning"
    fixes: tuple[Fix, ...] = ()
    if severity != "info":
        is_nearly_none = position is not None and position < NEARLY_NONE
        grader = fix.other_grader(run) if is_nearly_none else ()
        fixes = (*grader, *fix.larger_groups(run), _filter_groups(meaning.advice))
    detection = Detection(
        severity=severity,
        what=groups.message(meaning.which),
        evidence=(groups.evidence,),
        cause=meaning.cause,
        fixes=fixes,
        since=groups.since,
    )
    return _doubted(run, detection)


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What groups with equal rewards say of the prompts.

    Attributes:
        which: of their responses, in words.
        cause: None: the rule's.
        severity: None: that of their number.
        advice: in words.
    """

    which: str
    cause: str | None = None
    severity: Severity | None = None
    advice: str = "filter out prompts that are always or never solved"


def _meaning_of_equal_groups(run: RunLog, groups: _EqualGroups, position: float | None) -> _Meaning:
    """By the mean reward on their steps; `position`: its place in the rewards' range, None: unknown."""
    is_right = position is None or position >= th.MOSTLY_RIGHT
    if is_right and rises(run.table, th.SCORE) and rises(run.table, groups.evidence.metric):
        return _Meaning(
            which="probably all right",
            cause="the mean reward rises with their share: the policy solves more and more of its prompts",
            severity="info",
        )
    if position is None:  # only right groups would be a success, so this is at most a warning
        return _Meaning(which="all right or all wrong", severity="warning")
    if position >= th.LEARNED:
        return _Meaning(
            which="mostly all right",
            cause="the policy has learned these prompts: stop, or add harder ones",
            severity="info",
        )
    if 1 - MOSTLY_WRONG > position > MOSTLY_WRONG and not len(run.table.series(th.BEST)):
        return _Meaning(
            which="some all right, some all wrong",
            cause="the prompts are too easy or too hard for groups of this size",
        )
    if position >= th.MOSTLY_RIGHT:
        return _Meaning(
            which="mostly all right",
            cause="the prompts are too easy: filter out those that are always solved, or add harder ones",
            advice="filter out prompts that are always solved",
        )
    return _Meaning(
        which="mostly all wrong",
        cause="the prompts are too hard, or the grader cannot parse the answers: check some, start easier",
        advice="begin with easier prompts; grade some stored answers by hand",
    )


def _filter_groups(advice: str) -> Fix:
    """The advice, and the switches of frameworks that leave such groups out."""
    return fix.by_hand(
        advice,
        verl="algorithm.filter_groups.enable=True",
        openrlhf="--algo.dynamic_filtering_enable",
        slime="--dynamic-sampling-filter-path",
        **{"nemo-rl": "grpo.use_dynamic_sampling=true", "ms-swift": "--dynamic_sample true"},
    )


def _doubted(run: RunLog, detection: Detection) -> Detection:
    """A detection that needs the rewards' range, with doubt where that is not logged."""
    if run.reward_span:
        return detection
    assumed = ", and taken to be 0 to 1" if run.likely_span else ""
    doubt: Sure = ("low", f"the rewards' range is not logged{assumed}")
    missing = ", ".join(key for key in th.REWARDS if key not in run.table.columns)
    return detection.with_doubt(doubt, f"{missing} would show the range")


@dataclass(frozen=True, slots=True)
class _EqualGroups:
    """Groups with equal rewards.

    Attributes:
        amount: how many, in words; `when`: on which steps, in words.
        steps: on which they are frequent.
        since: the first step of the fault.
    """

    severity: Severity
    amount: str
    when: str
    evidence: Evidence
    steps: NDArray[np.int64]
    since: int

    def message(self, which: str) -> str:
        """The sentence; `which`: of their responses, in words."""
        when = f" {self.when}" if self.when else ""
        return f"{self.amount} have equal rewards, {which}, and teach nothing{when}"


def _equal_groups(run: RunLog) -> _EqualGroups | None:
    """Those of the run; on fewer than `MIN_STEPS` steps they are a warning."""
    series = run.table.series(th.ZERO_SPREAD.key)
    if len(series):
        crossed = crossing(series, th.ZERO_SPREAD)
        if crossed is None:
            return None
        is_inside = (series.steps >= crossed.first_step) & (series.steps <= crossed.last_step)
        return _EqualGroups(
            severity=crossed.severity if len(series) >= th.MIN_STEPS else "warning",
            amount=f"{crossed.worst:.0%} of the groups",
            when=crossed.where,
            evidence=crossed.evidence,
            steps=series.steps[is_inside],
            since=crossed.since,
        )
    series = run.table.series(th.GROUP_STD)
    if not is_frequent(series.values == 0.0):
        return None
    equal = series.steps[series.values == 0.0]
    share = len(equal) / len(series)
    is_critical = len(series) >= th.MIN_STEPS and share >= th.ZERO_SPREAD.tiers[-1][1]
    figure = f"exactly 0 on {len(equal):,} of {len(series):,} step(s)"
    return _EqualGroups(
        severity="critical" if is_critical else "warning",
        amount=f"on {share:.0%} of the steps all groups",
        when="",
        evidence=evidence_over(equal, th.GROUP_STD, figure),
        steps=equal,
        since=int(equal[0]),
    )


@Rule(
    "zero-reward",
    needs=(th.SCORE,),
    uses=(th.BEST, _ERRORS, *_ALL_ZERO),
    thresholds="— / every step of the log, and no spread, advantage or loss / "
    f"{ZERO_REWARD_STEPS} steps in a row",
)
def zero_reward(run: RunLog) -> Detection | None:
    """Some responses are rewarded."""
    has_best = len(run.table.series(th.BEST)) > 0
    steps, columns = run.table.aligned(th.SCORE, *((th.BEST,) if has_best else ()))
    zero = np.logical_and.reduce([column == 0.0 for column in columns])
    start, length = longest_true(zero)
    shown = _no_signal(run.table) if len(zero) and zero.all() else None
    if length < ZERO_REWARD_STEPS and shown is None:
        return None
    during = steps[start : start + length]
    evidence = [evidence_over(during, th.SCORE, f"exactly 0 on {length:,} steps")]
    errors = run.table.series(_ERRORS).values
    if len(errors):
        evidence.append(evidence_over(during, _ERRORS, f"{errors.mean():.1%} on average"))
    if shown is not None:
        evidence.append(shown)
    if (columns[0][:start] > 0.0).any():
        cause: str | None = "the policy has collapsed: earlier steps were rewarded"
        fixes: tuple[Fix, ...] = (*fix.calmer(run), fix.resume_before(int(during[0])))
    else:
        cause = None
        fixes = tuple(fix.other_grader(run))
    where = "" if length < len(steps) else ", all of the log"
    message = f"every reward is exactly 0 for {length:,} step(s){where}"
    severity: Severity = "critical" if length >= ZERO_REWARD_STEPS else "warning"
    detection = Detection(
        severity=severity,
        what=message,
        evidence=tuple(evidence),
        cause=cause,
        fixes=fixes,
    )
    if has_best:
        return detection
    if shown is not None:
        return replace(detection, sure=("medium", f"{shown.metric} shows no single reward that differs"))
    doubt: Sure = ("medium", "the best single reward is not logged")
    return detection.with_doubt(doubt, f"{th.BEST} would exclude rewards that average 0")


@Rule(
    "constant-reward",
    one_of=(th.BEST, th.SCORE),
    uses=(th.WORST, th.GROUP_STD, th.ZERO_SPREAD.key),
    fixes=fix.other_grader,
)
def constant_reward(run: RunLog) -> Detection | Skipped | None:
    """Responses get different rewards."""
    key = th.BEST if len(run.table.series(th.WORST)) else th.SCORE
    series = run.table.series(key)
    alike = next((one for one in _NO_SPREAD if len(run.table.series(one))), None)
    if alike is None:
        return Skipped("no metric shows whether single rewards differ", tuple(_NO_SPREAD))
    steps, (value, spread) = run.table.aligned(key, alike)
    wanted = _NO_SPREAD[alike]
    is_equal = spread == (value if wanted is None else wanted)
    if len(value) < 2 or len(value) < len(series) or not value[0] or np.ptp(value) or not is_equal.all():
        return None
    is_long = len(value) >= ZERO_REWARD_STEPS
    if not is_long and value[0] > 0.0:  # a short log of solved prompts
        return None
    message = f"every response of every step gets the reward {value[0]:g}"
    each = ((key, value), (alike, spread))
    seen = tuple(evidence_over(steps, name, f"{logged[0]:g} on these steps") for name, logged in each)
    cut = run.table.series(th.TRUNCATED.key).values[: th.START_STEPS]
    # At the start the limit may be why all get one value; later on, a policy without a signal reaches it.
    started_uncut = len(cut) > 0 and float(np.median(cut)) < MOSTLY_CUT
    without_limit = tuple(rule for rule in constant_reward.explains if rule != "truncated")
    return Detection(
        "critical" if is_long else "warning",
        message,
        seen,
        since=int(steps[0]),
        explains=None if started_uncut else without_limit,
        is_first=started_uncut,
    )


def _no_signal(table: Table) -> Evidence | None:
    """Evidence that all rewards are 0 at every step, not only their mean."""
    for key, value in _ALL_ZERO.items():
        series = table.series(key)
        if len(series) and (series.values == value).all():
            return evidence_over(series.steps, key, f"exactly {value:g} on these steps")
    return None


def _explore(run: RunLog) -> Iterator[Fix]:
    """A higher upper clip, a temperature of 1, a lower learning rate; omits what the run has already."""
    spec = run.spec
    clips = spec is None or spec.algorithm.rollout_correction.loss_type == "ppo_clip"
    high = (spec.actor.clip_ratio_high or spec.actor.clip_ratio) if spec else 0.0
    if clips and high < 0.28:
        in_openrlhf = "--actor.eps_clip_low_high 0.2 0.28"
        yield fix.change("actor.clip_ratio_high=0.28", why="clip-higher (DAPO)", openrlhf=in_openrlhf)
    if spec is None or spec.rollout.temperature < 1.0:
        yield fix.change("rollout.temperature=1.0")
    yield from fix.slower(run)


@Rule("entropy", fixes=_explore, needs=(th.ENTROPY.key,), uses=th.REWARDS)
def entropy(run: RunLog) -> Detection | None:
    """The policy explores until it has learned."""
    if run.has_learned:
        return None
    detection = detect_crossing(run, th.ENTROPY, "entropy is {worst:.2g} nats {where}")
    series = run.table.series(th.ENTROPY.key)
    score = run.table.series(th.SCORE)
    is_flat = len(score) >= ENTROPY_STEPS and run.likely_span is not None and not run.has_gained
    fall = lasting_change(series) if is_flat and len(series) >= ENTROPY_STEPS else None
    if detection is None and fall is not None and fall.end <= ENTROPY_SHARE * fall.start:
        message = f"entropy fell from {fall.start:.3g} to {fall.end:.3g} nats while the reward stayed flat"
        seen = evidence_over(series.steps, th.ENTROPY.key, f"{fall.end / fall.start:.0%} of its start")
        detection = Detection("warning", message, (seen,), since=fall.since)
    if detection is None:
        return None
    gains = run.likely_span is None and rises(run.table, th.SCORE)
    return _doubted(run, replace(detection, severity="info" if gains else "warning"))


def _no_entropy_bonus(run: RunLog) -> Iterator[Fix]:
    if run.spec is not None and run.spec.actor.entropy_coeff > 0:
        yield fix.change("actor.entropy_coeff=0", why="no entropy bonus")


@Rule(
    "entropy-rise",
    thresholds=f"— / × {ENTROPY_RISE[0]:g} (with an entropy bonus "
    f"× {ENTROPY_RISE[1]:g}) to > {ENTROPY_NATS:g} nat / —",
    needs=(th.ENTROPY.key,),
    uses=th.REWARDS,
    min_steps=th.MOVE_STEPS,
    fixes=(_no_entropy_bonus, fix.correct_tokens, fix.slower),
)
def entropy_rise(run: RunLog) -> Detection | None:
    """Entropy does not grow without a gain."""
    series = run.table.series(th.ENTROPY.key)
    change = lasting_change(series)
    bonus = run.spec.actor.entropy_coeff if run.spec is not None else 0.0
    has_bonus = bonus > 0.0
    if change is None or change.end < max(ENTROPY_RISE[has_bonus] * change.start, ENTROPY_NATS):
        return None
    if run.has_gained or rises(run.table, th.SCORE):
        return None
    start, end, since = change
    seen = change_evidence(th.ENTROPY.key, start, end, series.steps[series.steps >= since])
    message = f"entropy rose from {start:.2g} to {end:.2g} nats"
    cause = None
    if has_bonus:
        message += f" with an entropy bonus of coefficient {bonus:g}"
        cause = "the loss pays for entropy: the bonus outweighs what a better reward is worth"
    if bonus >= STRONG_BONUS:
        since = int(series.steps[0])
    if len(run.table.series(th.SCORE)):
        what = f"{message}, and the reward did not"
        return Detection("warning", what, (seen,), cause, since=since)
    doubt: Sure = ("low", "without the reward, this may be wanted exploration")
    unknown = f"{th.SCORE} would show whether the exploration helps"
    return Detection("warning", message, (seen,), cause, since=since).with_doubt(doubt, unknown)


@Rule(
    "reward-hacking",
    needs=(th.SCORE, th.VALIDATION),
    uses=(th.BEST, th.WORST),
    min_steps=VAL_MIN,
    fixes=(
        fix.by_hand("read the best rewarded responses (`rollouts/` of the run), and correct the grader"),
        fix.slower,
    ),
)
def reward_hacking(run: RunLog) -> Detection | Skipped | None:
    """Validation gains with the training reward."""
    validation = run.validation
    span = run.likely_span
    if span is None:
        return Skipped("the rewards' range is not logged", (th.BEST, th.WORST))
    steps, (score,) = run.table.aligned(th.SCORE)
    if len(validation) < VAL_MIN or len(score) < 2 * th.WINDOW:
        return Skipped("too few steps, or data sources that are never validated together", (th.VALIDATION,))
    size = span[1] - span[0]
    before, after = ends(validation.values, VAL_ENDS)
    start, end = ends(score)
    gain = (end - start) / size
    held_out = (after - before) / size
    if (end - span[0]) / size >= th.LEARNED:
        contradiction = _contradicted_top(run, end, after, size)
        if contradiction is not None:
            return contradiction
    # Near the top nothing is left to gain and scores vary; only a fall of this size is more than variation.
    had_learned = (before - span[0]) / size >= th.LEARNED and held_out > -HACKING_GAP[0][1]
    reached = [severity for severity, gap in HACKING_GAP if gain - held_out > gap]
    if gain < th.FLAT_REWARD or held_out >= th.FLAT_REWARD or had_learned or not reached:
        return None
    if not is_new_level(score, start, end):
        return None
    message = f"the training reward gained {gain:.0%} of its range, validation {held_out:.0%}"
    trained = change_evidence(th.SCORE, start, end, steps)
    validated = change_evidence(th.VALIDATION, before, after, validation.steps)
    change = lasting_change(run.table.series(th.SCORE))
    since = change.since if change else None
    return _doubted(run, Detection(reached[-1], message, (trained, validated), since=since))


def _contradicted_top(run: RunLog, end: float, after: float, size: float) -> Detection | None:
    """A training reward at its top while validation is far below its first value.

    A grader that is exploited within the first steps leaves no gain to be seen between the ends of the run.
    """
    score, validation = run.table.series(th.SCORE), run.validation
    first = float(validation.values[0])
    fall = (first - after) / size
    reached = [severity for severity, gap in HACKING_GAP if fall > gap]
    if not reached:
        return None
    message = f"the training reward is at its top, and validation fell by {fall:.0%} of its range"
    trained = evidence_over(score.steps, th.SCORE, f"{end:.3g} at the end")
    validated = change_evidence(th.VALIDATION, first, after, validation.steps)
    since = int(score.steps[0])  # the grader pays for it from the start
    return _doubted(run, Detection(reached[-1], message, (trained, validated), since=since))


def _lighter(run: RunLog, risen: str, fallen: str) -> Iterator[Fix]:
    """Fix that gives the risen term a tenth of the weight of the fallen one; advice without a spec."""
    terms = (run.spec.reward.terms if run.spec else None) or []
    weights = {term.label: term.weight for term in terms}
    if {risen, fallen} <= weights.keys():
        weights[risen] = weights[fallen] / 10.0
        changed = [term.model_copy(update={"weight": weights[term.label]}) for term in terms]
        dumped = json.dumps([term.model_dump(mode="json", exclude_defaults=True) for term in changed])
        yield fix.change(f"reward.terms={dumped}", why=f"{risen} weighs a tenth of {fallen}")
    else:
        yield fix.by_hand(f"lower the weight of {risen}, or pay it only to responses that also earn {fallen}")


@Rule(
    "reward-terms",
    uses=(_TERM,),
    thresholds=f"constant / a rise of {TERM_MOVE:.0%} of the largest value and a fall by {TERM_LOSS:.0%}, in "
    f"fewer than {TERM_ROWS} rows at every one / —",
)
def reward_terms(run: RunLog) -> Detection | Skipped | None:
    """No reward of a sum rises at the cost of another."""
    terms = _terms_of_reward(run)
    of_sum = {term: series for term, series in terms.items() if term != OVERLONG}
    if len(of_sum) < 2 or min(map(len, of_sum.values())) < FEWEST_ROWS:
        return Skipped("no two rewards of a sum are logged on several steps")
    risen: dict[str, Change] = {}
    fallen: dict[str, Change] = {}
    for term, series in of_sum.items():
        move = _move(series)
        if move is None:
            continue
        gain = move.end - move.start
        if gain >= TERM_MOVE * float(np.abs(series.values).max()):
            risen[term] = move
        if -gain >= TERM_LOSS * move.start > 0.0:  # a penalty, which is not positive, may grow
            fallen[term] = move
    if not risen or not fallen:
        return _constant_terms(terms)
    up = max(risen, key=lambda term: risen[term].end - risen[term].start)
    down = min(fallen, key=lambda term: fallen[term].end - fallen[term].start)
    shown = {up: risen[up], **fallen}
    evidence: list[Evidence] = []
    for term, move in shown.items():
        key = _TERM.replace("<term>", term)
        evidence.append(change_evidence(key, move.start, move.end, of_sum[term].steps))
    verb = "fall" if len(fallen) > 1 else "falls"
    return Detection(
        severity="warning",
        what=f"the reward {up} rises while {' and '.join(fallen)} {verb}",
        evidence=tuple(evidence),
        fixes=_lighter(run, up, down),
        since=min(move.since for move in shown.values()),
    )


def _terms_of_reward(run: RunLog) -> dict[str, Series]:
    """Name of each logged reward of a sum → its values."""
    terms: dict[str, Series] = {}
    for key in run.table.matching(_TERM):
        match = key_pattern(_TERM).fullmatch(key)
        if match:
            terms[match["term"]] = run.table.series(key)
    return terms


def _constant_terms(terms: Mapping[str, Series]) -> Detection | None:
    """Reports rewards of a sum that are the same on every step of a longer log."""
    same: dict[str, Series] = {}
    for term, series in terms.items():
        if len(series) >= TERM_ROWS and not np.ptp(series.values):
            same[term] = series
    if not same or len(same) == len(terms):
        return None
    values = ", ".join(f"{term} {series.values[0]:g}" for term, series in same.items())
    evidence: list[Evidence] = []
    for term, series in same.items():
        key = _TERM.replace("<term>", term)
        evidence.append(evidence_over(series.steps, key, "the same on every step"))
    return Detection(
        severity="info",
        what=f"a reward of the sum is constant: {values}",
        evidence=tuple(evidence),
        cause="every response earns it, or none does: it teaches nothing, or its grader is wrong",
        fixes=(fix.by_hand("grade some stored responses by hand"),),
    )


def _move(series: Series) -> Change | None:
    """The change of a series that lasts; in a log of few rows, if every row shows it."""
    steps = np.diff(series.values)
    is_steady = (steps > 0.0).all() or (steps < 0.0).all()
    return lasting_change(series) if len(series) >= TERM_ROWS or is_steady else None


@Rule(
    "no-format",
    needs=(th.SCORE,),
    uses=(_TERM,),
    thresholds=f"— / on every step / on {ZERO_REWARD_STEPS} steps",
    fixes=(
        fix.by_hand("read stored responses, and compare them with the form that the grader reads"),
        fix.by_hand(
            "show the form in the prompt, or train on a few examples of it first; check the chat template "
            "and the stop tokens"
        ),
    ),
)
def no_format(run: RunLog) -> Detection | Skipped | None:
    """Responses have the form that the grader reads."""
    score = run.table.series(th.SCORE)
    named = {term: series for term, series in _terms_of_reward(run).items() if _FORMAT.search(term)}
    if not named:
        return Skipped("no reward for the form of responses is logged")
    never = [term for term, series in named.items() if len(series) and not series.values.any()]
    # A penalty for the form is 0 where the form is right: then something else would have to be negative.
    if not never or len(never) < len(named) or np.median(score.values[-th.WINDOW :]) >= 0.0:
        return None
    term = never[0]
    series = named[never[0]]
    key = _TERM.replace("<term>", term)
    message = f"no response gets the reward {term}, and the mean reward is {score.values[-1]:.2g}"
    seen = (
        evidence_over(series.steps, key, "exactly 0 on these steps"),
        evidence_over(score.steps, th.SCORE, f"{np.median(score.values):.3g} (median)"),
    )
    return Detection("critical" if len(series) >= ZERO_REWARD_STEPS else "warning", message, seen)


@Rule(
    "temperature",
    facts=("temperature",),
    needs=(th.SCORE,),
    min_steps=th.MIN_STEPS,
    uses=(th.BEST, th.WORST, th.ZERO_SPREAD.key),
    thresholds=f"— / > {HOT:g} and nearly all wrong, or < {COLD:g} and half of the groups equal / —",
    fixes=(fix.change("rollout.temperature=1.0"),),
)
def temperature(run: RunLog) -> Detection | None:
    """Samples are neither random nor all the same."""
    heat = run.facts.temperature or 1.0
    score = run.table.series(th.SCORE)
    equal = run.table.series(th.ZERO_SPREAD.key)
    position = run.reward_position(ends(score.values)[0])
    if heat > HOT and position is not None and position < NEARLY_NONE:
        message = f"samples are drawn at temperature {heat:g}, and nearly all are wrong"
        cause = None
        figure = f"{ends(score.values)[0]:.2g} in the first steps"
        seen = evidence_over(score.steps[: th.WINDOW], th.SCORE, figure)
    elif heat < COLD and len(equal) and ends(equal.values)[0] >= th.ZERO_SPREAD.tiers[0][1]:
        message = f"samples are drawn at temperature {heat:g}, and most groups are equal"
        cause = _TOO_COLD
        figure = f"{ends(equal.values)[0]:.0%} in the first steps"
        seen = evidence_over(equal.steps[: th.WINDOW], th.ZERO_SPREAD.key, figure)
    else:
        return None
    return Detection("warning", message, (seen,), cause)


def _against_cut_responses(run: RunLog) -> Iterator[Fix]:
    """Twice the length limit, or four times where nearly every response reaches it; a length penalty."""
    if _no_longer_end(run):
        yield fix.by_hand(
            "responses ended at this limit before: read some (`rlctl samples RUN`), and find what no longer "
            "pays for an end, or whether the end token is left out of the loss"
        )
        return
    shares = run.table.series(th.TRUNCATED.key).values
    times = 4 if len(shares) and np.median(shares) > NEARLY_ALL else 2
    limit = run.facts.max_response_length
    if limit:
        yield fix.change(f"data.max_response_length={times * limit}")
    else:
        yield fix.larger("data.max_response_length", "raise the length limit")
    yield from fix.length_penalty(run)


def _no_longer_end(run: RunLog) -> bool:
    """Whether responses that ended before the limit no longer do, and the reward does not gain from it."""
    change = lasting_change(run.table.series(th.TRUNCATED.key))
    if change is None or change.start > FEW_CUT or change.end < MOSTLY_CUT:
        return False
    return len(run.table.series(th.SCORE)) > 0 and not run.has_gained and not rises(run.table, th.SCORE)


@Rule(
    "truncated",
    thresholds=th.TRUNCATED,
    one_of=(th.TRUNCATED.key, th.LENGTH),
    uses=("response_length/max",),
    fixes=(_against_cut_responses,),
)
def truncated(run: RunLog) -> Detection | Skipped | None:
    """Responses end before the length limit."""
    series = run.table.series(th.LENGTH)
    limit = run.facts.max_response_length
    if len(run.table.series(th.TRUNCATED.key)):
        message = "{worst:.1%} of the responses are cut off at the length limit {where}"
        found = detect_crossing(run, th.TRUNCATED, message)
        typical = float(np.median(run.table.series(th.TRUNCATED.key).values))
        return found and replace(found, explains=None if typical >= MOSTLY_CUT else ())
    if limit is None:
        return Skipped("neither the share of cut off responses nor the limit is known", (th.TRUNCATED.key,))
    full = series.steps[series.values >= AT_LIMIT * limit]
    share = len(full) / len(series)
    reached = [severity for severity, least in ALL_TRUNCATED if share > least]
    if not reached:
        return None
    how = ", inferred" if "inferred" in run.fact_origins.get("max_response_length", "") else ""
    message = f"on {share:.0%} of the steps all responses are as long as the limit ({limit} tokens{how})"
    seen = evidence_over(full, th.LENGTH, f"{limit} on {len(full):,} of {len(series):,} step(s)")
    unknown = f"{th.TRUNCATED.key} would show the share of single responses"
    explains = None if share >= NEARLY_ALL else ()
    return Detection(reached[-1], message, (seen,), could_not_check=(unknown,), explains=explains)


def _late_and_low(run: RunLog, series: Series) -> Detection | None:
    """Rewards near the worst one in a log that begins after `FLAT_STEPS` steps: little was learned before."""
    if COUNTED in run.notes or series.steps[0] < FLAT_STEPS or run.reward_span is None:
        return None
    typical = float(np.median(series.values[: th.WINDOW]))
    low, high = run.reward_span
    if typical >= low + NEARLY_NONE * (high - low) or typical <= low:
        return None
    message = f"after {series.steps[0]:,} steps the mean reward is {typical:.2g}, near the worst of {low:.2g}"
    seen = [evidence_over(series.steps[: th.WINDOW], th.SCORE, f"{typical:.3g} of {low:.3g} to {high:.3g}")]
    validation = run.validation
    if len(validation):
        seen.append(evidence_over(validation.steps, th.VALIDATION, f"{validation.values[-1]:.3g}"))
    return Detection("warning", message, tuple(seen))


@Rule(
    "flat-reward",
    needs=(th.SCORE,),
    uses=(th.BEST, th.WORST),
    thresholds=f"mostly right, or range unknown / over {FLAT_STEPS} steps, or {FLAT_STEPS_UNKNOWN} where the "
    f"range is not logged; a log from step {FLAT_STEPS} on: in the lowest {NEARLY_NONE:.0%} of it / —",
    fixes=(
        fix.larger("actor.lr", "raise the learning rate"),
        fix.by_hand("grade some stored answers by hand; check that samples come from the updated weights"),
    ),
)
def flat_reward(run: RunLog) -> Detection | Skipped | None:
    """The reward moves in a long run."""
    series = run.table.series(th.SCORE)
    span = run.likely_span
    found = _late_and_low(run, series)
    if found:
        return found
    if len(series) < FLAT_ROWS:
        return Skipped(f"a flat reward counts from {FLAT_ROWS} rows", needs_steps=FLAT_ROWS)
    steps = int(series.steps[-1] - series.steps[0])
    if steps > LONGEST_INTERVAL * len(series):
        steps = len(series) - 1
    least = FLAT_STEPS if run.reward_span else FLAT_STEPS_UNKNOWN
    if steps < least:
        return Skipped(f"the log covers {steps} steps, and a flat reward counts from {least}")
    values = series.values
    low, high = span or (0.0, float(np.abs(values).max()))
    fifths = np.array_split(values, min(5, len(values) // 2))
    parts = [float(np.median(fifth)) for fifth in fifths]
    moves = np.ptp(parts) >= th.FLAT_REWARD * (high - low) or max(parts) > FLAT_GROWTH * parts[0] > 0.0
    position = (parts[-1] - low) / ((high - low) or 1.0)
    if moves or not values.any() or (span and position >= th.LEARNED):
        return None
    severity: Severity = "warning" if position < th.MOSTLY_RIGHT and span else "info"
    message = f"the reward stays at {np.median(values):.2g} over {steps:,} steps"
    seen = change_evidence(th.SCORE, parts[0], parts[-1], series.steps)
    return _doubted(run, Detection(severity, message, (seen,)))
