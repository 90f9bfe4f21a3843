"""Checks that ground truths can be graded: each must score 1 as a response, with another number 0.

An empty response must score 0, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cache

from rlctl.reward import maths
from rlctl.reward.code import parse_tests
from rlctl.reward.graders import countdown_task
from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Failure, Grade, Sample
from rlctl.reward.sources import grader_for

#: Maximum number of ground truths with a cached result.
MAX_KNOWN = 100_000
#: Maximum characters of a response in a reason.
MAX_CHARS = 60
#: Graders with ground truths that are not answers → parser of the ground truth.
_TASKS: dict[str, Callable[[str], object]] = {"code": parse_tests, "countdown": countdown_task}
#: A number that is not a subscript; any number.
_NUMBERS = (re.compile(r"(?<![_\d])(?<!_\{)\d+"), re.compile(r"\d+"))
#: Numbers that need no grading: tests show that the grader parses all of them.
_PLAIN_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,6})?")
#: Grader and ground truth → its problem, "" if there is none.
_known: dict[tuple[str, str], str] = {}


def check_ground_truths(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the problem of each ground truth with the grader of its source; "" if there is none.

    Three responses are graded: `right_answer` (1 expected), `wrong_answer` (0), and an empty one (0). The
    grader runs in child processes with a deadline. The processes and the results are kept for later calls in
    this process. Tests for programs, and tasks that have many answers, are only parsed.

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


def right_answer(grader: str, ground_truth: str) -> str | None:
    """A response that must score 1: the ground truth, for mathematics in a box.

    None if the grader's ground truths are not responses, such as tests for a program.
    """
    if grader in _TASKS:
        return None
    return maths.boxed(ground_truth) if grader == "maths" else ground_truth


def wrong_answer(grader: str, ground_truth: str) -> str | None:
    """A response that must score 0: the right answer with its first number increased by one.

    A subscript is changed only if there is no other number. None if there is no number to change, or the
    grader does not compare numbers.
    """
    response = None if grader == "multiple_choice" else right_answer(grader, ground_truth)
    if response is None:
        return None
    found = next(filter(None, (pattern.search(response) for pattern in _NUMBERS)), None)
    if found is None:
        return None
    other = str(int(found[0]) + 1).zfill(len(found[0]))
    return response[: found.start()] + other + response[found.end() :]


def _problems(grader: str, truths: Sequence[str]) -> dict[str, str]:
    found = dict.fromkeys(truths, "")
    if grader in _TASKS:
        for truth in truths:
            try:
                _TASKS[grader](truth)
            except ValueError as error:
                found[truth] = str(error)
        return found
    asked: list[tuple[Sample, float]] = []
    for truth in truths:
        if grader != "maths" or not _PLAIN_NUMBER.fullmatch(truth):
            responses = ((right_answer(grader, truth), 1.0), (wrong_answer(grader, truth), 0.0), ("", 0.0))
            asked += [(Sample(text, truth), wanted) for text, wanted in responses if text is not None]
    grades = _pool(grader, os.getpid()).grade([sample for sample, _ in asked]) if asked else []
    for (sample, wanted), grade in zip(asked, grades, strict=True):
        found[sample.ground_truth] = found[sample.ground_truth] or _problem(sample, wanted, grade)
    return found


@cache
def _pool(grader: str, pid: int) -> GradingPool:
    """A pool per process: after a fork the pipes to the children belong to the parent."""
    return GradingPool(grader)


def _problem(sample: Sample, wanted: float, grade: Grade) -> str:
    if isinstance(grade, Failure):
        if grade.score is None:
            return grade.text.strip().splitlines()[-1]
        grade = grade.score
    if grade == wanted:
        return ""
    response = repr(sample.response[:MAX_CHARS]) if sample.response else "an empty response"
    return f"the grader gives {response} {grade:g}, not {wanted:g}"
