"""Gradings in processes that die on their deadline."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import rlctl
from rlctl.reward.graders import GraderName

DEADLINE_S = 5.0
MAX_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Failure:
    """A response the grader could not judge, and why (a traceback, or one line)."""

    text: str


Verdict = float | Failure


class GradingPool:
    """Grades pairs of (response, ground truth) in child processes, started when first needed.

    A grading that runs into `deadline_s` or brings its process down is a `Failure` of that pair only.
    """

    def __init__(
        self, grader: GraderName, *, deadline_s: float = DEADLINE_S, num_workers: int | None = None
    ) -> None:
        count = num_workers or _default_num_workers()
        self._workers = [_Worker(grader, deadline_s) for _ in range(count)]

    def grade_all(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """One verdict per pair, in order."""
        count = min(len(self._workers), max(1, len(pairs)))
        verdicts: list[Verdict] = [0.0] * len(pairs)

        def grade_share(first: int) -> None:
            for position in range(first, len(pairs), count):
                verdicts[position] = self._workers[first].grade(*pairs[position])

        with ThreadPoolExecutor(count) as threads:
            list(threads.map(grade_share, range(count)))
        return verdicts

    def close(self) -> None:
        """End the child processes; a later call starts new ones."""
        for worker in self._workers:
            worker.close()


class _Worker:
    def __init__(self, grader: GraderName, deadline_s: float) -> None:
        self._grader = grader
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[str] | None = None

    def grade(self, response: str, ground_truth: str) -> Verdict:
        process = self._process or self._start()
        if process.stdin is None or process.stdout is None:
            raise AssertionError("the grading process was started with pipes")
        try:
            process.stdin.write(json.dumps([response, ground_truth]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return self._bury(process)
        reply = json.loads(line)
        if "error" in reply:
            return Failure(reply["error"])
        score = float(reply["score"])
        return score if math.isfinite(score) else Failure(f"the grader returned {score}")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._reap(self._process)

    def _start(self) -> subprocess.Popen[str]:
        root = str(Path(rlctl.__file__).parents[1])  # importable in the child wherever it is here
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlctl.reward.worker", self._grader, str(self._deadline_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path},
        )
        return self._process

    def _bury(self, process: subprocess.Popen[str]) -> Failure:
        code = self._reap(process)
        if code == -signal.SIGALRM:
            return Failure(f"the grading took longer than {self._deadline_s:g} s")
        return Failure(f"the grading process ended with code {code}")

    def _reap(self, process: subprocess.Popen[str]) -> int:
        self._process = None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # what was still buffered for a dead process
                    continue
        return process.wait()


def _default_num_workers() -> int:
    """This rank's share of the cores it may run on."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // max(1, ranks_here)))
