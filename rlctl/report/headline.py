"""What a page about runs says first: reward, validation, state, pace, what to do, and differences of runs.

Rewards are means over windows at the start and at the end of a run. Their unit of observation is the step:
batches of different steps are sampled independently. A trend within a window widens the interval.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlctl.diagnose.diagnosis_report import settings, train_again
from rlctl.diagnose.rule import Diagnosis
from rlctl.errors import visible
from rlctl.evaluate.intervals import LEVEL, paired
from rlctl.metric_names import validation_score
from rlctl.track.jsonl import METRICS_FILE
from rlctl.track.open_run import RunRecord, RunState, read_state
from rlctl.track.run_dir import FAILURE_FILE, SPEC_FILE, read_mapping

_REWARD = "critic/score/mean"
_SECONDS = ("perf/time_per_step", "timing_s/step")
#: Maximum number of steps of a window, and the share of a run that it is at most.
WINDOW, SHARE = 20, 4


@dataclass(frozen=True, slots=True)
class Headline:
    """First facts about one run, as texts."""

    reward: str  # `0.310 → 0.702`: means of the first and of the last steps
    reward_change: str  # their difference with its 95 % interval, and the steps
    validation: str  # first → last mean reward over data sources
    validation_steps: str
    state: str  # `finished after step 24 of 24`, `failed before the first step`
    has_failed: bool  # or died
    reason: str  # why it failed or was stopped
    seconds: str  # median duration of a step
    advice: str  # what to do, in words
    command: str  # a command that does it; may be empty


def headline(record: RunRecord, diagnosis: Diagnosis) -> Headline:
    """The headline of a run that was diagnosed."""
    rows = logged_rows(record)
    state = read_state(record.path)
    reward, change = reward_change(values_by_step(rows, _REWARD))
    scores = {
        int(row["step"]): score for row in rows if (score := validation_score(_numbers(row))) is not None
    }
    scores = {step: score for step, score in scores.items() if math.isfinite(score)}
    seconds = next(filter(None, (values_by_step(rows, key) for key in _SECONDS)), {})
    advice, command = what_to_do(record, state, diagnosis)
    return Headline(
        reward=reward or "not yet",
        reward_change=change or "no step was logged",
        validation=_arrow(list(scores.values())) or "not measured",
        validation_steps=_steps(scores) or _why_unmeasured(record),
        state=_state_in_words(state),
        has_failed=state.state in {"failed", "died"},
        reason=visible(state.reason or ""),
        seconds=f"{np.median(list(seconds.values())):.3g} s" if seconds else "",
        advice=visible(advice),
        command=visible(command),
    )


def _state_in_words(state: RunState) -> str:
    if state.state == "empty":
        return "ended before the first step"
    if not state.step:
        return "starting" if state.state == "running" else f"{state.state} before the first step"
    return f"{state.state} after step {state.step:,} of {state.total_steps or '?'}"


def _why_unmeasured(record: RunRecord) -> str:
    spec = record.spec
    if spec.data.val_files and spec.trainer.test_freq > 0:
        return "not yet"
    return "needs data.val_files and trainer.test_freq"


def logged_rows(record: RunRecord) -> list[dict[str, Any]]:
    """The rows of a run's log; none before it has written one.

    Raises:
        UsageError: a line before the last is damaged.
    """
    return record.rows() if (record.path / METRICS_FILE).is_file() else []


def values_by_step(rows: Sequence[Mapping[str, Any]], key: str) -> dict[int, float]:
    """Step → finite value of a metric."""
    logged = ((int(row["step"]), row.get(key)) for row in rows)
    return {step: float(value) for step, value in logged if value is not None and math.isfinite(float(value))}


def window_of(count: int) -> int:
    """Number of steps of each window of a run with `count` steps; 1 where it is too short for an interval."""
    return max(1, min(WINDOW, count // SHARE))


def reward_change(rewards: Mapping[int, float]) -> tuple[str, str]:
    """`first → last`, and the difference with its interval (Welch's); means of windows, see `window_of`."""
    steps = list(rewards)
    values = list(rewards.values())
    if len(values) < 2:
        return _arrow(values), _steps(rewards)
    size = window_of(len(values))
    first = values[:size]
    last = values[-size:]
    shown = f"{np.mean(first):.3f} → {np.mean(last):.3f}"
    change = f"{np.mean(last) - np.mean(first):+.3f}"
    if size == 1:
        return shown, f"{change}, steps {steps[0]:,} and {steps[-1]:,}; too few steps for an interval"
    ends = f"steps {steps[0]:,}–{steps[size - 1]:,} and {steps[-size]:,}–{steps[-1]:,}"
    return shown, f"{change}{_welch(first, last)}, {ends}"


def _welch(first: Sequence[float], last: Sequence[float]) -> str:
    """The interval of the difference of two means as text; empty where neither has variance."""
    from scipy.stats import ttest_ind

    if np.ptp(first) == 0.0 and np.ptp(last) == 0.0:
        return ""
    interval = ttest_ind(last, first, equal_var=False).confidence_interval(LEVEL)
    return f" [{interval.low:+.3f}, {interval.high:+.3f}]"


def differences(names: Sequence[str], records: Sequence[RunRecord]) -> list[str]:
    """One sentence per further run: its reward minus that of the first, paired by step, with its interval.

    Over the last steps that both logged, see `window_of`.
    """
    rewards = [values_by_step(logged_rows(record), _REWARD) for record in records]
    sentences = []
    for name, own in zip(names[1:], rewards[1:], strict=True):
        shared = sorted(own.keys() & rewards[0].keys())
        steps = shared[-window_of(len(shared)) :]
        difference = paired([own[step] - rewards[0][step] for step in steps])
        if difference is None:
            sentences.append(f"{name} and {names[0]} have logged no reward at the same step")
            continue
        where = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,}–{steps[-1]:,}"
        text = f"reward of {name} minus that of {names[0]} in {where}: {difference.value:+.3f}"
        if difference.low is None or difference.high is None:
            sentences.append(f"{text}; no interval: {'one step' if len(steps) == 1 else 'always the same'}")
            continue
        unclear = (
            ", which includes 0: no difference is shown" if difference.low <= 0.0 <= difference.high else ""
        )
        sentences.append(f"{text} [{difference.low:+.3f}, {difference.high:+.3f}]{unclear}")
    return sentences


def what_to_do(record: RunRecord, state: RunState, diagnosis: Diagnosis) -> tuple[str, str]:
    """Words and a command: the correction of a failure, the first finding's fix, or the next command."""
    path = shlex.quote(str(record.path))
    if state.state == "failed":
        fix = read_mapping(record.path / FAILURE_FILE).get("fix")
        return str(fix or "correct the error"), f"rlctl train --resume {path}"
    for finding in diagnosis.findings:
        if finding.severity == "info" or finding.is_resolved or finding.because_of:
            continue
        fix = next(iter(finding.fixes), None)
        values = settings(fix, diagnosis.run) if fix else ""
        if not values:
            return f"{finding.what}; {fix.why}" if fix else finding.what, ""
        return f"{finding.what}: try {values}", train_again(record.path / SPEC_FILE, diagnosis.run, values)
    if state.state == "running":
        return "no warnings so far", f"rlctl watch {path}"
    if state.state in {"interrupted", "died", "empty"}:
        return "continue the run", f"rlctl train --resume {path}"
    return "evaluate the trained model", f"rlctl evaluate {path}"


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if isinstance(value, int | float)}


def _arrow(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{values[0]:.3f} → {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def _steps(values: Mapping[int, float]) -> str:
    steps = list(values)
    if not steps:
        return ""
    return f"steps {steps[0]:,} and {steps[-1]:,}" if len(steps) > 1 else f"step {steps[0]:,}"
