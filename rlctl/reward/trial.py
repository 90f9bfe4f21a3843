"""Tests graders on responses with known scores, before training with them.

`check_ground_truths` finds ground truths that cannot be graded; `try_reward` tests and times a whole reward.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any, Literal

import numpy as np

from rlctl.registry import GRADERS
from rlctl.reward.build import grader_for
from rlctl.reward.pool import GradingPool, is_ours, is_scorer
from rlctl.reward.protocol import (
    Failure,
    Grade,
    KnownResponses,
    Sample,
    Scorer,
    accepted_answers,
    same_and_changed,
)
from rlctl.user_code import is_file_function

Kind = Literal["ground truth", "number changed", "empty answer"]
#: Kind of response → its expected score.
EXPECTED: Mapping[Kind, float] = {"ground truth": 1.0, "number changed": 0.0, "empty answer": 0.0}

#: Maximum length of each list in a report.
MAX_SHOWN = 20
#: Characters of a response's end, and of a ground truth, in a report.
END_CHARS = 160
#: Tolerance of comparisons: scores may be float32.
TOLERANCE = 1e-5
#: Maximum number of ground truths with a cached result.
MAX_KNOWN = 100_000
#: Maximum characters of a response in a reason.
MAX_CHARS = 60
#: Grader and ground truth → its problem, "" if there is none.
_known: dict[tuple[str, str], str] = {}


def known_responses(grader: str, ground_truth: str) -> KnownResponses | None:
    """The responses of the grader's own function, or `same_and_changed(ground_truth)` if it has none.

    Of a list of accepted answers those of the first; the second is None if the list accepts it.

    A function of a user's file has none.

    None: scores of this grader are not comparable with 0 and 1, not even that of an empty response.

    Raises:
        ValueError: the grader cannot read the ground truth.
    """
    if is_file_function(grader):  # only its child processes import it
        return same_and_changed(ground_truth)
    derive = GRADERS.part(grader).known_responses or same_and_changed
    known = derive(alternatives(grader, ground_truth)[0])
    if known is None or known[1] in alternatives(grader, ground_truth):
        return known and (known[0], None)
    return known


def alternatives(grader: str, ground_truth: str) -> tuple[str, ...]:
    """The answers that a ground truth accepts; only built-in graders of answers read lists."""
    takes_lists = is_ours(grader) and not is_scorer(grader)
    return accepted_answers(ground_truth) if takes_lists else (ground_truth,)


def check_ground_truths(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the problem of each ground truth with the grader of its source; "" if there is none.

    Three responses are graded: the two of `known_responses` (1 and 0 expected), and an empty one (0). The
    grader runs in child processes with a deadline. The processes and the results are kept for later calls in
    this process. A ground truth without known responses, such as tests for programs, is only parsed. Each of
    several accepted answers is checked by itself.

    `pairs` are (data source, ground truth), in any order; duplicates are allowed.
    """
    asked = [(grader_for(source), truth) for source, truth in pairs]
    if len(_known) > MAX_KNOWN:
        _known.clear()
    fresh: dict[str, list[str]] = {}
    for grader, truth in dict.fromkeys(asked):
        if (grader, truth) not in _known:
            fresh.setdefault(grader, []).append(truth)
    for grader, truths in fresh.items():
        _known.update({(grader, truth): problem for truth, problem in _problems(grader, truths).items()})
    return [_known[key] for key in asked]


def _problems(grader: str, truths: Sequence[str]) -> dict[str, str]:
    problems = dict.fromkeys(truths, "")
    asked: list[tuple[str, Sample, float]] = []  # with the ground truth that the sample's answer is from
    for truth in truths:
        for answer in alternatives(grader, truth):
            try:
                known = known_responses(grader, answer)
            except ValueError as error:
                problems[truth] = str(error)
                continue
            if known and known != (None, None):
                expected = zip((*known, ""), (1.0, 0.0, 0.0), strict=True)
                asked += [
                    (truth, Sample(text, answer), score) for text, score in expected if text is not None
                ]
    grades = _pool(grader, os.getpid()).grade([sample for _, sample, _ in asked]) if asked else []
    for (truth, sample, score), grade in zip(asked, grades, strict=True):
        problems[truth] = problems[truth] or _problem(sample, score, grade)
    return problems


@cache
def _pool(grader: str, pid: int) -> GradingPool:
    """A pool per process: after a fork the pipes to the children belong to the parent."""
    return GradingPool(grader)


def _problem(sample: Sample, expected: float, grade: Grade) -> str:
    if isinstance(grade, Failure):
        if grade.score is None:
            return grade.text.strip().splitlines()[-1]
        grade = grade.score
    if grade == expected:
        return ""
    response = repr(sample.response[:MAX_CHARS]) if sample.response else "an empty response"
    return f"the grader gives {response} {grade:g}, not {expected:g}"


@dataclass(slots=True)
class TrialCounts:
    """Counts of one term, kind and source. `num_compared` excludes errors and unknown expected scores."""

    term: str
    kind: Kind
    data_source: str
    num: int = 0
    num_compared: int = 0
    num_agreeing: int = 0
    num_errors: int = 0


@dataclass(frozen=True, slots=True)
class GradedCase:
    """A response with its expected score and the given one."""

    term: str
    kind: Kind
    data_source: str
    where: str
    response_end: str
    ground_truth: str
    expected: float
    got: float


@dataclass(slots=True)
class Trial:
    """Results of all cases, with the first `MAX_SHOWN` disagreements and errors, and an example per kind."""

    all_counts: list[TrialCounts] = field(default_factory=list)
    disagreements: list[GradedCase] = field(default_factory=list)
    examples: list[GradedCase] = field(default_factory=list)  # the first case of each kind and term
    errors: list[str] = field(default_factory=list)  # `term, row: text`
    durations: dict[str, float] = field(default_factory=dict)  # seconds per response, all terms together

    @property
    def num_disagreements(self) -> int:
        """Number of disagreements over all terms, kinds and sources."""
        return sum(counts.num_compared - counts.num_agreeing for counts in self.all_counts)

    @property
    def num_errors(self) -> int:
        """Number of errors over all terms, kinds and sources."""
        return sum(counts.num_errors for counts in self.all_counts)

    def as_document(self) -> dict[str, Any]:
        """The results as JSON types."""
        return {
            "num_disagreements": self.num_disagreements,
            "num_errors": self.num_errors,
            "seconds_per_call": self.durations or None,
            "counts": [asdict(counts) for counts in self.all_counts],
            "disagreements": [asdict(disagreement) for disagreement in self.disagreements],
            "examples": [asdict(example) for example in self.examples],
            "errors": self.errors,
        }


def try_reward(
    terms: Mapping[str, Scorer],
    graders: Mapping[str, str],
    rows: Mapping[str, Sample],
    progress: Callable[[int, int], None],
) -> Trial:
    """Scores responses made of the rows' ground truths one at a time, so that each call is timed separately.

    A term whose scores are not 0 and 1, such as a reward model, is not compared. Ground truths that are not
    responses, such as tests for programs, are not tried.

    `terms` maps a label to the scorer, `graders` maps it to the name of the grader, and `rows` maps a row's
    place, for messages, to the sample with an empty response.
    """
    trial = Trial()
    all_counts: dict[tuple[str, Kind, str], TrialCounts] = {}
    seconds: list[float] = []
    # Starts processes that start at the first call, so that the first timed call takes as long as the others.
    of_each_source = list({row.data_source: row for row in rows.values()}.values())
    for scorer in terms.values():
        scorer.grade(of_each_source)
    for done, ((where, row), kind) in enumerate(product(rows.items(), EXPECTED)):
        progress(done, len(rows) * len(EXPECTED))
        asked = {name: one for name in terms if (one := _asked_of(graders[name], row, kind))}
        started = time.perf_counter()
        grades = {name: terms[name].grade([sample])[0] for name, (sample, _) in asked.items()}
        if asked:
            seconds.append(time.perf_counter() - started)
        for name, grade in grades.items():
            if isinstance(grade, Failure) and grade.kind == "inapplicable":
                continue
            key = (name, kind, row.data_source)
            counts = all_counts.setdefault(key, TrialCounts(*key))
            counts.num += 1
            score = grade.score if isinstance(grade, Failure) else grade
            if isinstance(grade, Failure) and score is None:
                counts.num_errors += 1
                if len(trial.errors) < MAX_SHOWN:
                    trial.errors.append(f"{name}, {where}: {grade.text.strip()}")
            elif score is not None:
                _compare(trial, counts, where, *asked[name], score)
    progress(1, 1)
    trial.all_counts = sorted(
        all_counts.values(), key=lambda counts: (counts.kind, counts.data_source, counts.term)
    )
    if seconds:
        p50, p99 = np.quantile(seconds, (0.5, 0.99), method="higher").tolist()
        mean = sum(seconds) / len(seconds)
        trial.durations = {"num": len(seconds), "mean": mean, "p50": p50, "p99": p99, "max": max(seconds)}
    return trial


def _asked_of(grader: str, row: Sample, kind: Kind) -> tuple[Sample, float | None] | None:
    """The response of this kind for the grader, and its expected score; None if it has none."""
    actual = grader_for(row.data_source) if grader == "auto" else grader
    truth = row.ground_truth
    try:
        known = known_responses(actual, truth)
    except ValueError:
        known = (None, None)  # the scorer reports it
    right, wrong = known or (truth, None)
    response = {"ground truth": right, "number changed": wrong, "empty answer": ""}[kind]
    if response is None:
        return None
    sample = replace(row, response=response)
    # The prompt may open thoughts, in which the response would be.
    return replace(sample, prompt="") if is_ours(actual) else sample, EXPECTED[kind] if known else None


def _compare(
    trial: Trial, counts: TrialCounts, where: str, sample: Sample, expected: float | None, got: float
) -> None:
    if expected is None:
        return
    end = sample.response[-END_CHARS:]
    truth = sample.ground_truth[:END_CHARS]
    about = (counts.term, counts.kind, counts.data_source, where)
    graded = GradedCase(*about, end, truth, expected, got)
    if all((example.term, example.kind) != about[:2] for example in trial.examples):
        trial.examples.append(graded)
    counts.num_compared += 1
    if math.isclose(got, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        counts.num_agreeing += 1
    elif len(trial.disagreements) < MAX_SHOWN:
        trial.disagreements.append(graded)
