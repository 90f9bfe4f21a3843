"""Gradings in child processes, and what a response gets whose grading fails."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from rlctl.reward.grading_process import GradingProcess, is_ours
from rlctl.reward.protocol import Failure, Grade, GradeAndAnswer, Sample, Scorer

DEADLINE_S = 5.0
#: Seconds for one call of a user's function: it may ask a server, or import a library when first called.
FUNCTION_DEADLINE_S = 30.0
MAX_WORKERS = 8
#: A response is right at this score or more.
RIGHT = 1.0
#: A ground truth as responses give it.
_AS_RESPONSE = ("{}", "\\boxed{{{}}}", "#### {}")
#: Ground truths whose self-test is remembered.
_MAX_TESTED = 100_000


class GradingPool(Scorer):
    """Grades samples in child processes, started when first needed.

    A grading that runs into its deadline or the memory limit, or brings its process down, is a `Failure`
    of that sample only. The response has caused it, and is scored like a wrong one, if the same grader
    gives the ground truth itself, as a response, 1 within the limits; otherwise the grader or the ground
    truth has. An exception of a grader of ours is graded in the same way; one of a user's function is the
    function's fault.

    Args:
        grader: a name in `rlctl.registry.GRADERS`, or `file.py:function`.
        params: the grader's own parameters.
        deadline_s: seconds one grading may take: of processor time for a grader of ours, by the clock for a
            user's function; None: 5 and 30.
        num_workers: processes; None: this rank's share of the cores.
    """

    def __init__(
        self,
        grader: str,
        params: dict[str, Any] | None = None,
        *,
        deadline_s: float | None = None,
        num_workers: int | None = None,
    ) -> None:
        self._is_ours = is_ours(grader)
        deadline_s = deadline_s or (DEADLINE_S if self._is_ours else FUNCTION_DEADLINE_S)
        self._kinds_of_responses = {"time-out", "memory", "crash"} | ({"error"} if self._is_ours else set())
        self._workers = [
            GradingProcess(grader, params or {}, deadline_s) for _ in range(num_workers or share_of_cores())
        ]
        self._wrong_scores: dict[str, float | None] = {}  # see `_test_ground_truths`

    @property
    def reads_answers(self) -> bool:
        """Whether the grader reads answers; of a user's function known after `check`."""
        return self._workers[0].reads_answers

    def check(self) -> None:
        """Start one process, to see that the grader can be loaded.

        Raises:
            UsageError: it cannot, with the reason.
        """
        self._workers[0].start()

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """One grade per sample, in order."""
        return [grade for grade, _ in self._map(samples, read_answers=False)]

    def grade_and_read(self, samples: Sequence[Sample]) -> list[GradeAndAnswer]:
        """Grades, and what the responses answer (None: nothing, or the grader reads no answers)."""
        return self._map(samples, read_answers=self.reads_answers)

    def close(self) -> None:
        """End the child processes and all that they have started; a later call starts new ones."""
        with ThreadPoolExecutor(len(self._workers)) as threads:
            list(threads.map(GradingProcess.close, self._workers))

    def _map(self, samples: Sequence[Sample], *, read_answers: bool) -> list[GradeAndAnswer]:
        graded = self._grade(samples, read_answers)
        if not self._is_ours:
            # The server that a function asks may be down now and up later: nothing is remembered.
            self._wrong_scores.clear()
        caused = {
            place: grade
            for place, (grade, _) in enumerate(graded)
            if isinstance(grade, Failure) and grade.kind in self._kinds_of_responses
        }
        self._test_ground_truths(samples[place] for place in caused)
        for place, failure in caused.items():
            graded[place] = replace(failure, score=self._wrong_scores[_key(samples[place])]), None
        return graded

    def _grade(self, samples: Sequence[Sample], read_answers: bool) -> list[GradeAndAnswer]:
        """All workers at once, each takes its share of the calls: one sample each, or all of one prompt."""
        calls = [[place] for place in range(len(samples))]
        if not self._is_ours and len(samples) > 1 and self._workers[0].takes_groups():
            by_prompt = groupby(range(len(samples)), lambda place: _key(samples[place]))
            calls = [list(places) for _, places in by_prompt]
        count = min(len(self._workers), max(1, len(calls)))
        graded: list[GradeAndAnswer] = [(0.0, None)] * len(samples)

        def grade_share(first: int) -> None:
            for places in calls[first::count]:
                found = self._workers[first].grade([samples[place] for place in places], read_answers)
                for place, grade in zip(places, found, strict=True):
                    graded[place] = grade

        with ThreadPoolExecutor(count) as threads:
            list(threads.map(grade_share, range(count)))
        return graded

    def _test_ground_truths(self, samples: Iterable[Sample]) -> None:
        """Fill `_wrong_scores`: what a wrong response scores where the ground truth itself scores 1.

        That is 0, or what a function gives an empty response if that is less: some give −1. None: the
        grader does not give the ground truth 1 within the limits.
        """
        if len(self._wrong_scores) > _MAX_TESTED:
            self._wrong_scores.clear()
        untested = {key: sample for sample in samples if (key := _key(sample)) not in self._wrong_scores}
        self._wrong_scores |= dict.fromkeys(untested)
        right: dict[str, Sample] = {}
        for form in _AS_RESPONSE:
            asked = [replace(s, response=form.format(s.ground_truth)) for s in untested.values()]
            for key, (grade, _) in zip(list(untested), self._grade(asked, read_answers=False), strict=True):
                if isinstance(grade, float) and grade >= RIGHT:
                    right[key] = untested.pop(key)
                elif isinstance(grade, Failure) and grade.kind == "time-out":
                    del untested[key]
        empty = [] if self._is_ours else [replace(sample, response="") for sample in right.values()]
        scores = [grade for grade, _ in self._grade(empty, read_answers=False)] or [0.0] * len(right)
        for key, score in zip(right, scores, strict=True):
            self._wrong_scores[key] = min(0.0, score) if isinstance(score, float) else 0.0


def share_of_cores() -> int:
    """How many processes this rank may keep busy: its share of the cores it may run on."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // max(1, ranks_here)))


def _key(sample: Sample) -> str:
    """What a grading depends on but for the response."""
    return json.dumps(asdict(replace(sample, response="", response_ids=())), default=str)
