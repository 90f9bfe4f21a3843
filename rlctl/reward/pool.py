"""Gradings in child processes, their deadlines, and what a response gets whose grading fails."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import rlctl
from rlctl.errors import UsageError
from rlctl.registry import GRADERS
from rlctl.reward.protocol import Failure, Grade, GradeAndAnswer, Sample, Scorer
from rlctl.user_code import is_file_function

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
START_DEADLINE_S = 60.0
#: A grading that is given so little processor time that it takes this many deadlines by the clock is ended.
STALLED = 10.0
#: Bytes of one reply, per sample.
MAX_REPLY_BYTES = 1 << 20


def is_ours(grader: str) -> bool:
    """Whether this package defines the grader; a user's file is not imported."""
    return not is_file_function(grader) and GRADERS[grader].__module__.startswith("rlctl.")


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
            _GradingProcess(grader, params or {}, deadline_s) for _ in range(num_workers or share_of_cores())
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
            list(threads.map(_GradingProcess.close, self._workers))

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


class _GradingProcess:
    """A process as in `rlctl.reward.worker`: started when first asked, and again after each end."""

    def __init__(self, grader: str, params: dict[str, Any], deadline_s: float) -> None:
        self._grader = grader
        self._params = params
        self._deadline_s = deadline_s
        self._is_ours = is_ours(grader)
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0  # of the process that grades
        self._number = 0  # of the request
        self._takes_groups = False
        #: the grader can read the answers of responses
        self.reads_answers = self._is_ours and GRADERS.part(grader).answer_of is not None

    def takes_groups(self) -> bool:
        """Whether the grader is to be called with all responses to a prompt."""
        with contextlib.suppress(UsageError):  # it shows again when grading
            self.start()
        return self._takes_groups

    def grade(self, samples: Sequence[Sample], read_answers: bool) -> list[GradeAndAnswer]:
        """Grades of one call, and answers where they are asked for.

        After a failure of a call with several samples each is graded alone. After a crash, or too little
        memory, in a process that was used before, a new one tries again: the cause may be what
        earlier gradings left in it, or a user who killed it.
        """
        is_used = self._process is not None
        graded = self._try(samples, read_answers)
        if len(samples) > 1 and any(isinstance(grade, Failure) for grade, _ in graded):
            return [self.grade([sample], read_answers)[0] for sample in samples]
        if is_used and _is_of(graded, {"memory", "crash"}):
            self.close()
            graded = self._try(samples, read_answers)
        if _is_of(graded, {"memory"}):
            self.close()
        return graded

    def start(self) -> None:
        """See that there is a process that has loaded the grader.

        Raises:
            UsageError: it could not be loaded.
        """
        if self._process is not None:
            return
        root = str(Path(rlctl.__file__).parents[1])  # importable in the child wherever it is here
        path = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        # -P: a file in the working directory that is named like a module of Python's does not replace it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlctl.reward.worker", self._grader, json.dumps(self._params)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,
            bufsize=0,
        )
        self._number, self._pid = -1, 0
        reply = self._ask(None, START_DEADLINE_S)
        if isinstance(reply, Failure):
            what = "takes too long" if reply.kind == "time-out" else f"failed: {reply.text}"
            fix = "import it in Python to see more"
            raise UsageError(f"importing it {what}", where=self._grader, fix=fix)
        if "what" in reply:
            self.close()
            raise UsageError(reply["what"], where=reply["where"], fix=reply["fix"])
        self._pid = reply["pid"]
        self._takes_groups, self.reads_answers = reply["takes_groups"], reply["reads_answers"]

    def close(self) -> None:
        """End the process and everything that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()  # which the process that watches over the others takes for the end
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10.0)
        with contextlib.suppress(ProcessLookupError):  # what is left if that process was killed or stopped
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _try(self, samples: Sequence[Sample], read_answers: bool) -> list[GradeAndAnswer]:
        try:
            self.start()
        except UsageError as error:  # it could be loaded when the run began
            return [(Failure(str(error), "machine"), None)] * len(samples)
        if not self._takes_groups:  # no other form of function reads tokens
            samples = [replace(sample, response_ids=()) for sample in samples]
        asked = {"samples": [asdict(sample) for sample in samples]}
        reply = self._ask(asked, self._deadline_s * len(samples), MAX_REPLY_BYTES * len(samples))
        if isinstance(reply, Failure):
            return [(reply, None)] * len(samples)
        graded: list[GradeAndAnswer] = []
        for sample, found in zip(samples, reply["grades"], strict=True):
            if "error" in found:
                graded.append((Failure(found["error"], found.get("kind", "error")), None))
                continue
            answer = None
            if read_answers and self._process is not None:
                read = self._ask({"answer_of": sample.response}, self._deadline_s)
                answer = None if isinstance(read, Failure) else read["answer"]  # the score stands
            graded.append((float(found["score"]), answer))
        return graded

    def _ask(
        self, request: dict[str, Any] | None, deadline_s: float, max_bytes: int = MAX_REPLY_BYTES
    ) -> dict[str, Any] | Failure:
        """The reply with this request's number; a `Failure`, with the process ended, if none comes.

        Without a request, the first message is awaited. The deadline is processor time for a grader of ours,
        else by the clock.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise AssertionError("the grading process was started with pipes")
        self._number += 1
        waiting = b""
        if request is not None:
            waiting = json.dumps({"number": self._number, **request}, default=str).encode() + b"\n"
        inward, outward = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(inward, False)  # it may never read
        started, cpu_started = time.monotonic(), self._cpu_seconds()
        received, num_bytes = b"", 0
        found: dict[str, Any] | Failure | None = None
        while found is None:
            left = self._time_left(deadline_s, started, cpu_started)
            if isinstance(left, Failure):
                found = left
                break
            poll = select.poll()
            poll.register(outward, select.POLLIN)
            if waiting:
                poll.register(inward, select.POLLOUT)
            ready = dict(poll.poll(1000.0 * left + 1.0))
            if inward in ready:
                try:
                    waiting = waiting[os.write(inward, waiting) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:  # the other pipe has ended, too
                    waiting = b""
            if outward not in ready:
                continue
            part = os.read(outward, 1 << 16)
            num_bytes += len(part)
            *lines, received = (received + part).split(b"\n")
            found = next((reply for line in lines if (reply := self._reply(line))), None)
            if found is None and not part:
                found = Failure("the grading process has gone away", "crash")
            elif found is None and num_bytes > max_bytes:
                text = f"the grading process replied with more than {max_bytes >> 20} MiB"
                found = Failure(text, "crash")
        if isinstance(found, Failure):
            self.close()
        return found

    def _time_left(self, deadline_s: float, started: float, cpu_started: float) -> float | Failure:
        """Seconds until the deadline has to be looked at again."""
        elapsed = time.monotonic() - started
        left = deadline_s - elapsed
        if self._pid and self._is_ours:
            # Our own graders only compute: what they take in processor time does not depend on how busy the
            # machine is. A user's function may wait, for a server.
            left = max(left, deadline_s - (self._cpu_seconds() - cpu_started))
            if elapsed > STALLED * deadline_s:
                text = "the machine was too busy for the grading to get processor time"
                return Failure(text, "machine")
        return left if left > 0.0 else Failure(f"the grading took longer than {deadline_s:g} s", "time-out")

    def _reply(self, line: bytes) -> dict[str, Any] | Failure | None:
        """The line as a reply to the current request; None: it is none."""
        try:
            reply = json.loads(line)
        except ValueError:  # something else wrote to the pipe
            return None
        if reply.get("number") == self._number:
            return dict(reply)
        if "ended" not in reply:
            return None
        code = int(reply["ended"])
        how = f" ({signal.strsignal(-code)})" if code < 0 else ""
        return Failure(f"the grading process ended with code {code}{how}", "crash")

    def _cpu_seconds(self) -> float:
        """Processor time of the process that grades; 0.0 once it has ended."""
        try:  # the clock's number is that of clock_getcpuclockid(3)
            return time.clock_gettime(~self._pid << 3 | 2) if self._pid else 0.0
        except OSError:
            return 0.0


def _is_of(graded: Sequence[GradeAndAnswer], kinds: set[str]) -> bool:
    return any(isinstance(grade, Failure) and grade.kind in kinds for grade, _ in graded)
