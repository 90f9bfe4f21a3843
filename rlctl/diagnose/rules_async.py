"""Rules about samples that come late, wrongly or not at all, and about what keeps the trainer waiting."""

from __future__ import annotations

import numpy as np

from rlctl.diagnose import remedies as remedy
from rlctl.diagnose import thresholds as th
from rlctl.diagnose.finding import SEVERITIES, Evidence, Finding, Remedy, Skipped, rule
from rlctl.diagnose.signals import change_evidence, crossing, trend
from rlctl.diagnose.table import RunLog, Series

_STALENESS, _DROPPED = th.STALENESS.key, "training/stale_dropped"
_GRADING, _STEP = "timing_s/reward", "timing_s/step"
_TIMES = 1e-9  # seconds that count as none


@rule("staleness", "samples are fresh enough", one_of=(_STALENESS, _DROPPED))
def staleness(run: RunLog) -> Finding | Skipped | None:
    """Samples are many batches old, or more and more are dropped for their age."""
    series, updates = run.table.series(_STALENESS), run.facts.updates_per_batch or 1
    crossed = crossing(Series(series.steps, series.values / updates), th.STALENESS)
    dropped = _dropping(run)
    if crossed is None and dropped is None:
        return None
    if crossed is not None:
        what = f"the oldest samples are {crossed.worst:.3g} batches old {crossed.where}"
    else:
        what = "more and more samples are dropped because they are too old"
    return Finding(
        "warning",
        what,
        (*((crossed.evidence,) if crossed else ()), *((dropped,) if dropped else ())),
        "generation runs too far ahead of training, or training cannot keep up",
        th.STALENESS.source,
        _fresher(run),
        "high" if run.facts.updates_per_batch or dropped else "medium",
        "age and drops are counted"
        if run.facts.updates_per_batch or dropped
        else "how many updates make a batch is unknown",
    )


def _dropping(run: RunLog) -> Evidence | None:
    """Dropped samples per step that grow; logs may count them since the start."""
    series = run.table.series(_DROPPED)
    if len(series) < 2 * th.MIN_STEPS:
        return None
    if (np.diff(series.values) >= 0.0).all():
        series = Series(series.steps[1:], np.diff(series.values))
    rise = trend(series)
    least = th.DROPPED_SHARE * (run.facts.batch_size or 1 / th.DROPPED_SHARE)
    if rise is None or not rise.rises or rise.end < max(th.DROPPED_GROWTH * max(rise.start, 0.0), least):
        return None
    return change_evidence(_DROPPED, rise.start, rise.end, series.steps)


def _fresher(run: RunLog) -> tuple[Remedy, ...]:
    return remedy.fresher(run, fully=False) or (
        remedy.by_hand(
            "lower how far generation may run ahead, or give training more of the machine",
            verl="async_training.staleness_threshold",
            trl="max_staleness",
            openrlhf="--train.async_queue_size",
        ),
    )


@rule(
    "nondeterminism",
    "a policy that has not moved is equal to itself",
    one_of=(th.RATIO_ON_POLICY.key, th.PPO_KL_ON_POLICY.key),
    facts=("updates_per_batch", "bypass_mode"),
)
def nondeterminism(run: RunLog) -> Finding | Skipped | None:
    """With one update per batch π_θ is π_old, so their ratio is 1."""
    if run.facts.updates_per_batch != 1:
        return Skipped("several updates per batch move the policy")
    if run.facts.bypass_mode:
        return Skipped("in bypass mode π_old is the sampler's")
    ratio = run.table.series(th.RATIO_ON_POLICY.key)
    crossed = crossing(Series(ratio.steps, ratio.values - 1.0), th.RATIO_ON_POLICY)
    crossed = crossed or crossing(run.table.series(th.PPO_KL_ON_POLICY.key), th.PPO_KL_ON_POLICY)
    if crossed is None:
        return None
    figure = "π_θ/π_old is off 1" if crossed.key == th.RATIO_ON_POLICY.key else "π_θ and π_old differ"
    return Finding(
        crossed.severity,
        f"{figure} by {crossed.worst:.2g} {crossed.where}, although the policy has not moved",
        (crossed.evidence,),
        "two passes of the same model differ: mixture-of-experts routing, dropout, or kernels that depend on "
        "the batch",
        th.RATIO_ON_POLICY.source,
        (
            remedy.by_hand(
                "deterministic kernels, no dropout; replay the routing of a mixture of experts",
                verl="actor_rollout_ref.rollout.full_determinism=True",
            ),
        ),
        "high",
        "both figures are of one set of weights",
    )


@rule("slow-grader", "grading keeps nobody waiting", needs=(_GRADING, _STEP), uses=(th.IDLE.key,))
def slow_grader(run: RunLog) -> Finding | Skipped | None:
    """Now and then grading takes a multiple of its usual time, and much of the step."""
    steps, (grading, whole) = run.table.aligned(_GRADING, _STEP)
    median = float(np.median(grading))
    slow = (grading > th.SLOW_GRADING_MEDIANS * max(median, _TIMES)) & (
        grading > th.SLOW_GRADING_SHARE * whole
    )
    idle = crossing(run.table.series(th.IDLE.key), th.IDLE)
    if slow.sum() < max(th.SLOW_GRADING_COUNT, th.SLOW_GRADING_STEPS * len(steps)):
        return None
    figure = f"{grading.max():.3g} s at worst, {median:.3g} s in the median"
    evidence = Evidence(_GRADING, figure, int(steps[slow][0]), int(steps[slow][-1]))
    runs_code = run.spec is not None and any(term.name == "code" for term in run.spec.reward.all_terms)
    shorter = (remedy.change("reward.code.timeout_s=5"),) if runs_code else ()
    return Finding(
        "warning",
        f"grading hangs on {slow.mean():.0%} of the steps, up to {grading.max() / max(median, _TIMES):.0f} "
        "times its median",
        (evidence, *((idle.evidence,) if idle else ())),
        "single answers keep the grader busy, while everything else waits for it",
        th.OWN,
        (*shorter, remedy.by_hand("grade in processes that can be killed, with a deadline per answer")),
        "high",
        "the times are measured",
    )


@rule(
    "failed-rollouts",
    "rollouts and grading succeed",
    one_of=tuple(levels.key for levels in th.FAILED),
)
def failed_rollouts(run: RunLog) -> Finding | Skipped | None:
    """A lasting share of rollouts is empty or failed, or could not be graded."""
    found = [
        crossed
        for levels in th.FAILED
        if (crossed := crossing(run.table.series(levels.key), levels)) is not None
    ]
    if not found:
        return None
    worst = min(found, key=lambda one: SEVERITIES.index(one.severity))
    grading = worst.key.startswith("reward/")
    what = "gradings fail" if grading else "rollouts fail or are empty"
    return Finding(
        worst.severity,
        f"{worst.worst:.0%} of the {what} {worst.where}",
        tuple(one.evidence for one in found),
        "the grader raises on some answers"
        if grading
        else "faults of the environment or of the engine: time-outs, tools, memory",
        th.FAILED[0].source,
        (remedy.by_hand("run the grader on stored rollouts" if grading else "read the engine's own log"),),
        "high",
        "failures are counted",
    )


RULES = (
    staleness,
    nondeterminism,
    slow_grader,
    failed_rollouts,
)
