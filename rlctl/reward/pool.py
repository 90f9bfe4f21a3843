"""Gradings in processes that die on their deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rlctl
from rlctl.errors import UsageError
from rlctl.reward.protocol import Failure, Sample, Verdict

DEADLINE_S = 5.0
MAX_WORKERS = 8


class GradingPool:
    """Grades samples in child processes, started when first needed.

    A grading that runs into `deadline_s` or brings its process down is a `Failure` of that sample only.

    Args:
        grader: a name in `rlctl.reward.graders.GRADERS`, or `file.py:function`.
        deadline_s: seconds one grading may take.
        num_workers: processes; None: this rank's share of the cores.
    """

    def __init__(
        self, grader: str, *, deadline_s: float = DEADLINE_S, num_workers: int | None = None
    ) -> None:
        count = num_workers or share_of_cores()
        self._workers = [_Worker(grader, deadline_s) for _ in range(count)]

    def check(self) -> None:
        """Start one process, to see that the grader can be loaded.

        Raises:
            UsageError: it cannot; says why.
        """
        self._workers[0].start()

    def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in order."""
        return [verdict for verdict, _ in self._map(samples, read_answers=False)]

    def judge_and_read(self, samples: Sequence[Sample]) -> list[tuple[Verdict, str | None]]:
        """Verdicts, and what the responses answer (None: nothing, or the grader reads no answers)."""
        return self._map(samples, read_answers=True)

    def _map(self, samples: Sequence[Sample], *, read_answers: bool) -> list[tuple[Verdict, str | None]]:
        count = min(len(self._workers), max(1, len(samples)))
        judged: list[tuple[Verdict, str | None]] = [(0.0, None)] * len(samples)

        def grade_share(first: int) -> None:
            for position in range(first, len(samples), count):
                judged[position] = self._workers[first].grade(samples[position], read_answers)

        with ThreadPoolExecutor(count) as threads:
            list(threads.map(grade_share, range(count)))
        return judged

    def close(self) -> None:
        """End the child processes; a later call starts new ones."""
        for worker in self._workers:
            worker.close()


class _Worker:
    def __init__(self, grader: str, deadline_s: float) -> None:
        self._grader = grader
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[str] | None = None

    def grade(self, sample: Sample, read_answer: bool) -> tuple[Verdict, str | None]:
        try:
            process = self._process or self.start()
        except UsageError as error:  # it could be loaded when the run began
            return Failure(str(error)), None
        asked = {"sample": asdict(sample), "read_answer": read_answer}
        reply = self._exchange(process, json.dumps(asked, default=str) + "\n")
        if reply is None:
            code = self._reap(process)
            if code == -signal.SIGALRM:
                return Failure(f"the grading took longer than {self._deadline_s:g} s"), None
            return Failure(f"the grading process ended with code {code}"), None
        if "error" in reply:
            return Failure(reply["error"]), None
        return float(reply["score"]), reply.get("answer")

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
