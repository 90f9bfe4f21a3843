"""Whether ground truths can be graded at all: as a response each must score 1, and no response 0."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

from rlctl.reward.graders import GraderName, grader_for
from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Failure, Sample, Verdict

#: Ground truths whose verdict is remembered.
MAX_KNOWN = 100_000


def check_ground_truths(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """What is wrong with each ground truth as its source's grader sees it; "" where nothing is.

    The grader runs in child processes that are ended on their deadline. They, and what is known of equal
    pairs, stay for the next call of this process.

    Args:
        pairs: (data source, ground truth), in any order, repeated or not.
    """
    return _round_trips(os.getpid()).check(pairs)


class _RoundTrips:
    def __init__(self) -> None:
        self._pools: dict[GraderName, GradingPool] = {}
        self._known: dict[tuple[GraderName, str], str] = {}

    def check(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        asked = [(grader_for(source), truth) for source, truth in pairs]
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        fresh = [key for key in dict.fromkeys(asked) if key not in self._known]
        for grader in dict.fromkeys(grader for grader, _ in fresh):
            truths = [truth for name, truth in fresh if name == grader]
            pool = self._pools.setdefault(grader, GradingPool(grader))
            verdicts = pool.judge([Sample(response, truth) for truth in truths for response in (truth, "")])
            for place, truth in enumerate(truths):
                self._known[grader, truth] = _reason(verdicts[2 * place], verdicts[2 * place + 1])
        return [self._known[key] for key in asked]


@lru_cache(maxsize=1)  # by process: after a fork the pipes to the children belong to the parent
def _round_trips(pid: int) -> _RoundTrips:
    return _RoundTrips()


def _reason(itself: Verdict, empty: Verdict) -> str:
    for verdict, wanted, response in ((itself, 1.0, "itself"), (empty, 0.0, "an empty response")):
        if isinstance(verdict, Failure):
            return verdict.text.strip().splitlines()[-1]
        if verdict != wanted:
            return f"the grader gives {response} {verdict:g}, not {wanted:g}"
    return ""
