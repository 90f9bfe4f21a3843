"""Checks that ground truths can be graded, with responses that have known scores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

from rlctl.reward.known_responses import known_responses
from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Failure, Grade, Sample
from rlctl.reward.sources import grader_for

#: Maximum number of ground truths with a cached result.
MAX_KNOWN = 100_000
#: Maximum characters of a response in a reason.
MAX_CHARS = 60
#: Grader and ground truth → its problem, "" if there is none.
_known: dict[tuple[str, str], str] = {}


def check_ground_truths(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the problem of each ground truth with the grader of its source; "" if there is none.

    Three responses are graded: the two of `known_responses` (1 and 0 expected), and an empty one (0). The
    grader runs in child processes with a deadline. The processes and the results are kept for later calls in
    this process. A ground truth without known responses, such as tests for programs, is only parsed.

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
    asked: list[tuple[Sample, float]] = []
    for truth in truths:
        try:
            known = known_responses(grader, truth)
        except ValueError as error:
            problems[truth] = str(error)
            continue
        if known and known != (None, None):
            expected = zip((*known, ""), (1.0, 0.0, 0.0), strict=True)
            asked += [(Sample(text, truth), score) for text, score in expected if text is not None]
    grades = _pool(grader, os.getpid()).grade([sample for sample, _ in asked]) if asked else []
    for (sample, score), grade in zip(asked, grades, strict=True):
        problems[sample.ground_truth] = problems[sample.ground_truth] or _problem(sample, score, grade)
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
