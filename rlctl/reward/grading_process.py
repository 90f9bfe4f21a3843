"""One child process that grades, and the deadlines that are kept here, outside of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import rlctl
from rlctl.errors import UsageError
from rlctl.registry import GRADERS
from rlctl.reward.protocol import Failure, GradeAndAnswer, Sample
from rlctl.user_code import is_file_function

START_DEADLINE_S = 60.0
#: A grading that is given so little processor time that it takes this many deadlines by the clock is ended.
STALLED = 10.0
#: Bytes of one reply, per sample.
MAX_REPLY_BYTES = 1 << 20


def is_ours(grader: str) -> bool:
    """Whether this package defines the grader; a user's file is not imported."""
    return not is_file_function(grader) and GRADERS[grader].__module__.startswith("rlctl.")


class GradingProcess:
    """A process as in `rlctl.reward.worker`: started when first asked, and again after each end.

    Attributes:
        reads_answers: the grader can read the answers of responses.
    """

    def __init__(self, grader: str, params: dict[str, Any], deadline_s: float) -> None:
        self._grader = grader
        self._params = params
        self._deadline_s = deadline_s
        self._is_ours = is_ours(grader)
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0  # of the process that grades
        self._number = 0  # of the request
        self._takes_groups = False
        self.reads_answers = self._is_ours and GRADERS.part(grader).answer_of is not None

    def takes_groups(self) -> bool:
        """Whether the grader is to be called with all responses to a prompt."""
        with contextlib.suppress(UsageError):  # it shows again when grading
            self.start()
        return self._takes_groups

    def grade(self, samples: Sequence[Sample], read_answers: bool) -> list[GradeAndAnswer]:
        """Grades of one call, and answers where they are asked for.

        After a failure of a call with several samples each is graded alone. After a crash, or too little
        memory, in a process that was used before, a new one tries again: what earlier gradings left behind
        may be the cause, or somebody who killed it.
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

        Args:
            request: None: only the first message is awaited.
            deadline_s: of processor time for a grader of ours, else by the clock.
            max_bytes: that may be received.
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
                waiting = _write(inward, waiting)
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


def _write(fd: int, waiting: bytes) -> bytes:
    """Write what the pipe takes; gives the rest."""
    try:
        return waiting[os.write(fd, waiting) :]
    except BlockingIOError:
        return waiting
    except BrokenPipeError:  # the other pipe has ended, too
        return b""


def _is_of(graded: Sequence[GradeAndAnswer], kinds: set[str]) -> bool:
    return any(isinstance(grade, Failure) and grade.kind in kinds for grade, _ in graded)
