"""Whether ground truths can be graded at all: as a response each must score 1, and no response 0."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from rlctl.reward.code import parse_tests
from rlctl.reward.countdown import parse_task
from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Failure, Sample, Verdict
from rlctl.reward.sources import SourceGrader, grader_for

#: Ground truths whose verdict is remembered.
MAX_KNOWN = 100_000
#: Ground truths that are no answers, and what reads them.
_TASKS: dict[SourceGrader, Callable[[str], object]] = {"code": parse_tests, "countdown": parse_task}
#: Numbers that need no process: the tests show that all of them go round.
_PLAIN_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,6})?")


def check_ground_truths(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """What is wrong with each ground truth as its source's grader sees it; "" where nothing is.

    The grader runs in child processes that are ended on their deadline. They, and what is known of equal
    pairs, stay for the next call of this process. Of tests for programs, and of tasks that have many
    answers, it is only seen whether they can be read.

    Args:
        pairs: (data source, ground truth), in any order, repeated or not.
    """
    return _round_trips(os.getpid()).check(pairs)


def answers_itself(grader: str) -> bool:
    """Whether a ground truth of this grader is also a right response; tests for a program are not."""
    return grader not in _TASKS


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
            return [_unreadable(_TASKS[grader], truth) for truth in truths]
        doubtful = [truth for truth in truths if grader != "maths" or not _PLAIN_NUMBER.fullmatch(truth)]
        samples = [Sample(response, truth) for truth in doubtful for response in (truth, "")]
        verdicts: list[Verdict] = []
        if samples:
            verdicts = self._pools.setdefault(grader, GradingPool(grader)).judge(samples)
        judged = zip(verdicts[::2], verdicts[1::2], strict=True)
        found = dict(zip(doubtful, (_reason(itself, empty) for itself, empty in judged), strict=True))
        return [found.get(truth, "") for truth in truths]


@lru_cache(maxsize=1)  # by process: after a fork the pipes to the children belong to the parent
def _round_trips(pid: int) -> _RoundTrips:
    return _RoundTrips()


def _unreadable(read: Callable[[str], object], truth: str) -> str:
    try:
        read(truth)
    except ValueError as error:
        return str(error)
    return ""


def _reason(itself: Verdict, empty: Verdict) -> str:
    for verdict, wanted, response in ((itself, 1.0, "the ground truth"), (empty, 0.0, "an empty response")):
        if isinstance(verdict, Failure):
            return verdict.text.strip().splitlines()[-1]
        if verdict != wanted:
            return f"the grader gives {response} {verdict:g}, not {wanted:g}"
    return ""
