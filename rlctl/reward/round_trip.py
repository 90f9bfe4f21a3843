"""Whether ground truths can be graded: each must score 1 as a response, another number 0, no answer 0."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from rlctl.reward import maths
from rlctl.reward.code import parse_tests
from rlctl.reward.graders import countdown_task
from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Failure, Grade, Sample
from rlctl.reward.sources import SourceGrader, grader_for

#: Ground truths whose grade is remembered.
MAX_KNOWN = 100_000
#: Characters of a response in a reason.
MAX_CHARS = 60
#: Ground truths that are no answers, and what reads them.
_TASKS: dict[SourceGrader, Callable[[str], object]] = {"code": parse_tests, "countdown": countdown_task}
#: The first number that is no subscript, and any.
_NUMBERS = (re.compile(r"(?<![_\d])(?<!_\{)\d+"), re.compile(r"\d+"))
#: Numbers that need no process: the tests show that the grader reads all of them.
_PLAIN_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,6})?")


def check_ground_truths(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """What is wrong with each ground truth as its source's grader sees it; "" where nothing is.

    Three responses are graded: `right_answer` (1 expected), `wrong_answer` (0), and an empty one (0). The
    grader runs in child processes that are ended on their deadline. They, and what is known of equal
    pairs, stay for the next call of this process. Of tests for programs, and of tasks that have many
    answers, it is only seen whether they can be read.

    Pairs are (data source, ground truth), in any order, repeated or not.
    """
    return _round_trips(os.getpid()).check(pairs)


def right_answer(grader: str, ground_truth: str) -> str | None:
    """A response that must score 1: for mathematics the ground truth in a box, else the ground truth.

    None: a ground truth of this grader is no response, as tests for a program.
    """
    if grader in _TASKS:
        return None
    return maths.boxed(ground_truth) if grader == "maths" else ground_truth


def wrong_answer(grader: str, ground_truth: str) -> str | None:
    """A response that must score 0: the right answer with its first number one higher.

    A subscript is changed only where there is no other number. None: there is no number to change, or the
    grader compares no numbers.
    """
    response = None if grader == "multiple_choice" else right_answer(grader, ground_truth)
    if response is None:
        return None
    found = next(filter(None, (pattern.search(response) for pattern in _NUMBERS)), None)
    if found is None:
        return None
    other = str(int(found[0]) + 1).zfill(len(found[0]))
    return response[: found.start()] + other + response[found.end() :]


class _RoundTrips:
    def __init__(self) -> None:
        self._pools: dict[SourceGrader, GradingPool] = {}
        self._known: dict[tuple[SourceGrader, str], str] = {}

    def check(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        asked = [(grader_for(source), truth) for source, truth in pairs]
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        fresh: dict[SourceGrader, list[str]] = {}
        for grader, truth in dict.fromkeys(asked):
            if (grader, truth) not in self._known:
                fresh.setdefault(grader, []).append(truth)
        for grader, truths in fresh.items():
            for truth, reason in zip(truths, self._reasons(grader, truths), strict=True):
                self._known[grader, truth] = reason
        return [self._known[key] for key in asked]

    def _reasons(self, grader: SourceGrader, truths: Sequence[str]) -> list[str]:
        if grader in _TASKS:
            problems = []
            for truth in truths:
                try:
                    _TASKS[grader](truth)
                    problems.append("")
                except ValueError as error:
                    problems.append(str(error))
            return problems
        doubtful = [truth for truth in truths if grader != "maths" or not _PLAIN_NUMBER.fullmatch(truth)]
        asked: list[tuple[Sample, float]] = []
        for truth in doubtful:
            responses = ((right_answer(grader, truth), 1.0), (wrong_answer(grader, truth), 0.0), ("", 0.0))
            asked += [(Sample(text, truth), wanted) for text, wanted in responses if text is not None]
        grades: list[Grade] = []
        if asked:
            pool = self._pools.setdefault(grader, GradingPool(grader))
            grades = pool.grade([sample for sample, _ in asked])
        found: dict[str, str] = {}
        for (sample, wanted), grade in zip(asked, grades, strict=True):
            found[sample.ground_truth] = found.get(sample.ground_truth) or _reason(sample, wanted, grade)
        return [found.get(truth, "") for truth in truths]


@lru_cache(maxsize=1)  # by process: after a fork the pipes to the children belong to the parent
def _round_trips(pid: int) -> _RoundTrips:
    return _RoundTrips()


def _reason(sample: Sample, wanted: float, grade: Grade) -> str:
    if isinstance(grade, Failure):
        if grade.score is None:
            return grade.text.strip().splitlines()[-1]
        grade = grade.score
    if grade == wanted:
        return ""
    response = repr(sample.response[:MAX_CHARS]) if sample.response else "an empty response"
    return f"the grader gives {response} {grade:g}, not {wanted:g}"
