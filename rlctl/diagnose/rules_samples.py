"""Rules about failures: exceptions, stale or failed samples, nondeterminism, and slow grading."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlctl.diagnose import fixes as fix
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import Evidence, Fix, Severity, Skipped, Sure
from rlctl.diagnose.rule import Detection, Rule, crossings, detect_crossing, worst_of
from rlctl.diagnose.signals import Crossing, crossing, evidence_over
from rlctl.diagnose.table import RunLog, Series
from rlctl.diagnose.thresholds import Levels

_GRADING, _STEP = "timing_s/reward", "timing_s/step"
STALENESS = Levels(th.STALENESS[0], (("warning", 8.0),))
#: Levels of |mean ratio − 1| and |ppo_kl| where the policy cannot have moved.
RATIO_ON_POLICY = Levels("actor/ppo_ratio_mean", (("warning", 1e-3),), absolute=True)
PPO_KL_ON_POLICY = Levels("actor/ppo_kl", (("warning", 1e-3),), absolute=True)
#: Grading is slow beyond this multiple of its median and this share of the step, on at least this number and
#: this share of the steps.
SLOW_GRADING_MEDIANS, SLOW_GRADING_SHARE, SLOW_GRADING_COUNT, SLOW_GRADING_STEPS = 3.0, 0.3, 3, 0.05
IDLE = Levels("perf/trainer_idle_fraction", (("warning", 0.3),))
FAILED = tuple(
    Levels(key, (("warning", 0.05), ("critical", 0.25)), is_share=True)
    for key in ("rollout/error_fraction", "rollout/empty_fraction", "reward/error_fraction")
)
_TIMES = 1e-9  # seconds; lower limit of the median, so that it is never 0


#: Kinds of exceptions, which the file explains.
_EXCEPTIONS = tomllib.loads(Path(__file__).with_name("exceptions.toml").read_text(encoding="utf-8"))


@Rule("exception", fixes=(fix.by_hand("read the lines above the exception"),))
def exception(run: RunLog) -> Detection | Skipped:
    """The log does not end with an exception."""
    raised = run.exception
    if raised is None:
        return Skipped("the log does not end with an exception")
    known: dict[str, Any] = next(
        (one for one in _EXCEPTIONS.values() if re.search(one["pattern"], raised.text)), {}
    )
    fixes = (fix.by_hand(known["fix"], **known.get("settings", {})),) if "fix" in known else ()
    where = f" ({raised.where})" if raised.where else ""
    steps = run.table.steps
    when = f"after step {steps[-1]}" if len(steps) else "before its first step"
    seen = Evidence("line of the log", f"{raised.line}{where}")
    severity: Severity = "info" if raised.is_stop or known is _EXCEPTIONS["stopped"] else "critical"
    sure: Sure | None = None if known else ("low", "the exception matches no known kind of failure")
    return Detection(
        severity=severity,
        what=f"the log ends {when} with {raised.text}",
        evidence=(seen,),
        cause=known.get("cause"),
        fixes=fixes if known else None,
        sure=sure,
        since=int(run.table.steps[-1]) if len(run.table.steps) else None,
    )


def _fresher(run: RunLog) -> tuple[Fix, ...]:
    return tuple(fix.fresher(run, fully=False)) or (
        fix.by_hand(
            "lower how far generation may run ahead, or give training more GPUs",
            verl="async_training.staleness_threshold",
            trl="max_staleness",
            openrlhf="--train.async_queue_size",
        ),
    )


@Rule("staleness", fixes=_fresher, one_of=th.STALENESS, uses=(th.KL.key,))
def staleness(run: RunLog) -> Detection | None:
    """Samples are recent enough."""
    has_oldest = STALENESS.key in run.table.columns
    series = run.table.series(STALENESS.key if has_oldest else th.STALENESS[1])
    ages = Series(series.steps, series.values / (run.facts.updates_per_batch or 1))
    crossed = crossing(ages, STALENESS)
    apart = _apart(run)
    if not ages.values.any() or (crossed is None and apart is None):
        return None
    since = int(ages.steps[np.argmax(ages.values > 0.0)])
    if apart is not None:
        message = f"samples are up to {ages.values.max():.3g} batches old, and nothing corrects for it"
        seen = evidence_over(ages.steps, STALENESS.key, f"up to {series.values.max():.3g} updates")
        fixes = (*fix.fresher(run, fully=True), *fix.correct_tokens(run), *_fresher(run))
        return Detection("critical", message, (seen, apart.evidence), fixes=fixes, since=since)
    whose = "the oldest samples are" if has_oldest else "samples are on average"
    found = detect_crossing(run, STALENESS, whose + " {worst:.3g} batches old {where}", ages)
    unknown: Sure = ("medium", "the number of updates per batch is unknown")
    sure = None if run.facts.updates_per_batch else unknown
    return found and replace(found, sure=sure, since=since)


def _apart(run: RunLog) -> Crossing | None:
    """The KL between the policies over its critical level, where neither weights nor rejection correct it."""
    is_corrected = run.facts.rollout_is != "off" or run.facts.rollout_rs != "off"
    return None if is_corrected else crossing(run.table.series(th.KL.key), th.KL)


@Rule(
    "nondeterminism",
    facts=("updates_per_batch", "bypass_mode"),
    fixes=(
        fix.by_hand(
            "deterministic kernels, no dropout; replay the routing of a mixture of experts",
            verl="actor_rollout_ref.rollout.full_determinism=True",
        ),
    ),
    one_of=(RATIO_ON_POLICY.key, PPO_KL_ON_POLICY.key),
)
def nondeterminism(run: RunLog) -> Detection | Skipped | None:
    """A policy that has not moved is equal to itself."""
    if run.facts.updates_per_batch != 1:
        return Skipped("several updates per batch move the policy")
    if run.facts.bypass_mode:
        return Skipped("in bypass mode π_old is the sampler's")
    ratio = run.table.series(RATIO_ON_POLICY.key)
    message = "{worst:.2g} {where}, although the policy has not moved"
    off_one = Series(ratio.steps, ratio.values - 1.0)
    found = detect_crossing(run, RATIO_ON_POLICY, f"π_θ/π_old is off 1 by {message}", off_one)
    return found or detect_crossing(run, PPO_KL_ON_POLICY, f"π_θ and π_old differ by {message}")


def _faster_grading(run: RunLog) -> Iterator[Fix]:
    if run.spec is not None and any(term.name == "code" for term in run.spec.reward.all_terms):
        yield fix.change("reward.code.timeout_s=5")
    yield fix.by_hand("grade in processes that can be killed, with a deadline per answer")


@Rule("slow-grader", fixes=_faster_grading, needs=(_GRADING, _STEP), uses=(IDLE.key,))
def slow_grader(run: RunLog) -> Detection | None:
    """Grading does not delay training."""
    steps, (grading, whole) = run.table.aligned(_GRADING, _STEP)
    median = float(np.median(grading))
    slow = (grading > SLOW_GRADING_MEDIANS * max(median, _TIMES)) & (grading > SLOW_GRADING_SHARE * whole)
    idle = crossing(run.table.series(IDLE.key), IDLE)
    if slow.sum() < max(SLOW_GRADING_COUNT, SLOW_GRADING_STEPS * len(steps)):
        return None
    times = grading.max() / max(median, _TIMES)
    figure = f"{grading.max():.3g} s at most, {median:.3g} s in the median"
    seen = evidence_over(steps[slow], _GRADING, figure)
    message = f"grading is slow on {slow.mean():.0%} of the steps, up to {times:.0f} times its median"
    return Detection("warning", message, (seen, idle.evidence) if idle else (seen,))


@Rule(
    "failed-rollouts",
    one_of=tuple(levels.key for levels in FAILED),
    fixes=(fix.by_hand("read the engine's own log"),),
)
def failed_rollouts(run: RunLog) -> Detection | None:
    """Rollouts and grading succeed."""
    crossed = crossings(run, FAILED)
    if not crossed:
        return None
    worst = worst_of(crossed)
    evidence = tuple(one.evidence for one in crossed)
    figure = f"{worst.worst:.0%} of the"
    if not worst.key.startswith("reward/"):
        return Detection(
            worst.severity, f"{figure} rollouts fail or are empty {worst.where}", evidence, since=worst.since
        )
    message = f"{figure} gradings fail {worst.where}"
    cause = "the grader raises on some answers"
    return Detection(
        severity=worst.severity,
        what=message,
        evidence=evidence,
        cause=cause,
        fixes=fix.other_grader(run),
        since=worst.since,
    )
