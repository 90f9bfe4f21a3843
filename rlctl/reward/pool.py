"""Gradings in processes that die on their deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import rlctl
from rlctl.errors import UsageError
from rlctl.reward.graders import GRADERS
from rlctl.reward.protocol import Failure, Grade, Sample

DEADLINE_S = 5.0
MAX_WORKERS = 8
#: A response is right at this score or more.
RIGHT = 1.0
#: A ground truth as responses give it.
_AS_RESPONSE = ("{}", "\\boxed{{{}}}", "#### {}")
#: Ground truths whose self-test is remembered.
_MAX_TESTED = 100_000

_Graded = tuple[Grade, str | None]


class GradingPool:
    """Grades samples in child processes, started when first needed.

    A grading that runs into `deadline_s` or the memory limit, or brings its process down, is a `Failure`
    of that sample only. The response has caused it, and is scored like a wrong one, if the same grader
    gives the ground truth itself, as a response, 1 within the limits; otherwise the grader or the ground
    truth has. An exception of a grader of ours is graded in the same way; one of a user's function is the
    function's fault.

    Args:
        grader: a name in `rlctl.reward.graders.GRADERS`, or `file.py:function`.
        deadline_s: seconds one grading may take: of processor time, for a user's function by the clock.
        num_workers: processes; None: this rank's share of the cores.
    """

    def __init__(
        self, grader: str, *, deadline_s: float = DEADLINE_S, num_workers: int | None = None
    ) -> None:
        count = num_workers or share_of_cores()
        self._is_ours = grader in GRADERS
        self._kinds_of_responses = {"time-out", "memory", "crash"} | ({"error"} if self._is_ours else set())
        self._workers = [_Worker(grader, deadline_s, self._is_ours) for _ in range(count)]
        self._wrong_scores: dict[str, float | None] = {}  # see `_wrong_score`

    def check(self) -> None:
        """Start one process, to see that the grader can be loaded.

        Raises:
            UsageError: it cannot; says why.
        """
        self._workers[0].start()

    def grade(self, samples: Sequence[Sample]) -> list[Grade]:
        """One grade per sample, in order."""
        return [grade for grade, _ in self._map(samples, read_answers=False)]

    def grade_and_read(self, samples: Sequence[Sample]) -> list[tuple[Grade, str | None]]:
        """Grades, and what the responses answer (None: nothing, or the grader reads no answers)."""
        return self._map(samples, read_answers=True)

    def close(self) -> None:
        """End the child processes; a later call starts new ones."""
        for worker in self._workers:
            worker.close()

    def _map(self, samples: Sequence[Sample], *, read_answers: bool) -> list[_Graded]:
        graded = self._grade(samples, read_answers)
        if not self._is_ours:
            # The server that a function asks may be down now and up later: nothing is remembered.
            self._wrong_scores.clear()
        blamed = {
            place: grade
            for place, (grade, _) in enumerate(graded)
            if isinstance(grade, Failure) and grade.kind in self._kinds_of_responses
        }
        self._test_ground_truths(samples[place] for place in blamed)
        for place, failure in blamed.items():
            graded[place] = replace(failure, score=self._wrong_scores[_key(samples[place])]), None
        return graded

    def _grade(self, samples: Sequence[Sample], read_answers: bool) -> list[_Graded]:
        """All workers at once, each takes its share of the samples."""
        count = min(len(self._workers), max(1, len(samples)))
        graded: list[_Graded] = [(0.0, None)] * len(samples)

        def grade_share(first: int) -> None:
            for position in range(first, len(samples), count):
                graded[position] = self._workers[first].grade(samples[position], read_answers)

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


class _Worker:
    def __init__(self, grader: str, deadline_s: float, is_ours: bool) -> None:
        self._grader = grader
        self._deadline_s = deadline_s
        self._is_ours = is_ours
        self._process: subprocess.Popen[str] | None = None

    def grade(self, sample: Sample, read_answer: bool) -> _Graded:
        is_used = self._process is not None
        graded = self._try(sample, read_answer)
        if is_used and isinstance(graded[0], Failure) and graded[0].kind in {"memory", "crash"}:
            # What earlier gradings left behind may be the cause, or somebody who killed it: once more.
            self.close()
            graded = self._try(sample, read_answer)
        if isinstance(graded[0], Failure) and graded[0].kind == "memory":
            self.close()
        return graded

    def _try(self, sample: Sample, read_answer: bool) -> _Graded:
        try:
            process = self._process or self.start()
        except UsageError as error:  # it could be loaded when the run began
            return Failure(str(error), "machine"), None
        asked = {"sample": asdict(sample), "read_answer": read_answer}
        reply = self._exchange(process, json.dumps(asked, default=str) + "\n")
        if reply is None:
            return self._post_mortem(self._reap(process)), None
        if "error" in reply:
            return Failure(reply["error"], reply.get("kind", "error")), None
        answered = self._exchange(process, "") if read_answer else {}
        if answered is None:
            self._reap(process)  # reading the answer took too long, but the score stands
            return float(reply["score"]), None
        return float(reply["score"]), answered.get("answer")

    def _post_mortem(self, code: int) -> Failure:
        if code == -signal.SIGPROF or (code == -signal.SIGALRM and not self._is_ours):
            return Failure(f"the grading took longer than {self._deadline_s:g} s", "time-out")
        if code == -signal.SIGALRM:
            return Failure("the machine was too busy for the grading to get processor time", "machine")
        how = f" ({signal.strsignal(-code)})" if code < 0 else ""
        return Failure(f"the grading process ended with code {code}{how}", "crash")

    def start(self) -> subprocess.Popen[str]:
        """A process that has loaded the grader.

        Raises:
            UsageError: it could not be loaded.
        """
        root = str(Path(rlctl.__file__).parents[1])  # importable in the child wherever it is here
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "rlctl.reward.worker", self._grader, str(self._deadline_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path},
        )
        reply = self._exchange(process, "")
        if reply is None:
            code = self._reap(process)
            why = "takes too long" if code == -signal.SIGALRM else f"ends the process with code {code}"
            raise UsageError(f"importing it {why}", where=self._grader, fix="import it in Python to see more")
        if "what" in reply:
            self._reap(process)
            raise UsageError(reply["what"], where=reply["where"], fix=reply["fix"])
        return process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._reap(self._process)

    def _exchange(self, process: subprocess.Popen[str], line: str) -> dict[str, Any] | None:
        """Send a line, if there is one, and read the reply; None when the process is gone."""
        if process.stdin is None or process.stdout is None:
            raise AssertionError("the grading process was started with pipes")
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            return None
        return dict(json.loads(answer)) if answer else None

    def _reap(self, process: subprocess.Popen[str]) -> int:
        self._process = None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # what was still buffered for a dead process
                    continue
        return process.wait()


def share_of_cores() -> int:
    """How many processes this rank may keep busy: its share of the cores it may run on."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // max(1, ranks_here)))


def _key(sample: Sample) -> str:
    """What a grading depends on but for the response."""
    return json.dumps(asdict(replace(sample, response="")), default=str)
