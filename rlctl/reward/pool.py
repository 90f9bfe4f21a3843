"""Grades in child processes with time limits, and scores responses that end their own grading."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from rlctl import leftovers
from rlctl.errors import UsageError
from rlctl.extras import MissingPackage
from rlctl.processes import cpu_seconds
from rlctl.processor_time import STALLED
from rlctl.registry import GRADERS, is_builtin
from rlctl.reward import fork_server
from rlctl.reward.fork_server import START_DEADLINE_S, ForkedProcess
from rlctl.reward.protocol import (
    Failure,
    FailureKind,
    Grade,
    GradeAndAnswer,
    Sample,
    Scorer,
    accepted_answers,
)
from rlctl.reward.votes import same_answers
from rlctl.user_code import is_file_function

_log = logging.getLogger(__name__)
DEADLINE_S = 5.0
#: Seconds for one call of a user's function, which may query a server, or import a library on its first call.
FUNCTION_DEADLINE_S = 30.0
MAX_WORKERS = 8
#: Minimum score of a correct response.
RIGHT = 1.0
#: Forms in which a response may state the ground truth.
_AS_RESPONSE = ("{}", "\\boxed{{{}}}", "#### {}")
#: Maximum number of ground truths with a cached self-test.
_MAX_TESTED = 100_000
#: Kinds of failures of a grading that reached a limit or ended its process.
LIMITS: frozenset[FailureKind] = frozenset({"time-out", "memory", "crash"})
#: Seconds in which a process replies after the time limit of a call, and from which waiting calls are long.
_RESPONSE_S, _LONG_WAIT_S = 5.0, 2.0
#: Maximum bytes of a reply, per sample.
MAX_REPLY_BYTES = 1 << 20


def is_ours(grader: str) -> bool:
    """Whether this package defines the grader; a user's file is not imported."""
    return not is_file_function(grader) and is_builtin(GRADERS[grader])


def is_scorer(grader: str) -> bool:
    """Whether a grader is a `Scorer` of rlctl's own, which is built from the whole `reward` section."""
    return is_ours(grader) and isinstance(GRADERS[grader], type)


class GradingPool(Scorer):
    """Grades samples in child processes, which are started when first needed.

    A grading that reaches its deadline or the memory limit, or crashes its process, is a `Failure` of that
    sample only. To find the cause, the same grader grades the ground truth as a response. If that scores 1
    within the limits, the response is the cause and is scored as wrong; otherwise the grader or the ground
    truth is broken. An exception of a built-in grader is treated in the same way; an exception of a user's
    function is always an error of the function.

    Args:
        grader: a name in `rlctl.registry.GRADERS`, or `file.py:function`.
        params: the grader's own parameters.
        deadline_s: time limit of one grading in seconds: processor time for a built-in grader, wall-clock
            time for a user's function; None: 5 and 30.
        num_workers: processes; None: this rank's share of the cores.
        threads: calls of a user's plain function at the same time in each process.
    """

    def __init__(
        self,
        grader: str,
        params: dict[str, Any] | None = None,
        *,
        deadline_s: float | None = None,
        num_workers: int | None = None,
        threads: int = 1,
    ) -> None:
        self._name = grader
        self._is_ours = is_ours(grader)
        deadline_s = deadline_s or (DEADLINE_S if self._is_ours else FUNCTION_DEADLINE_S)
        self._kinds_of_responses = LIMITS | ({"error"} if self._is_ours else set())
        self._workers = [
            _GradingProcess(grader, params or {}, deadline_s, threads)
            for _ in range(num_workers or share_of_cores())
        ]
        self._has_advised = self._is_ours
        self._wrong_scores: dict[str, float | None] = {}  # see `_test_ground_truths`

    @property
    def reads_answers(self) -> bool:
        """Whether the grader can extract answers; for a user's function only valid after `check`."""
        return self._workers[0].reads_answers

    @property
    def asks(self) -> tuple[str, ...]:
        """What a user's function needs of every row, see `worker.LoadedGrader`; valid after `check`."""
        return self._workers[0].asks

    def check(self) -> None:
        """Starts one process to check that the grader can be loaded.

        Raises:
            UsageError: the grader cannot be loaded; states the reason.
        """
        self._workers[0].start()

    def grade_and_read(self, samples: Sequence[Sample], *, read_answers: bool = True) -> list[GradeAndAnswer]:
        """Returns grades and answers, in order (None: no answer, or the grader cannot extract answers).

        Raises:
            MissingPackage: a built-in grader needs a package that is not installed.
        """
        samples = [
            sample.without_thoughts() if self._is_ours else replace(sample, conversation=())
            for sample in samples
        ]
        graded = self._grade(samples, read_answers and self.reads_answers)
        if not self._is_ours:
            # Nothing is cached, because a server that the function uses may become available later.
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

    def same_answers(self, samples: Sequence[Sample], answers: Sequence[str | None]) -> list[str | None]:
        """The answers, with one text for all that the grader holds equal."""
        if not (self._is_ours and GRADERS.part(self._name).compares_answers):
            return list(answers)
        without_prompts = [replace(sample.without_thoughts(), prompt=sample.prompt) for sample in samples]
        return same_answers(without_prompts, answers, self._grades)

    def _grades(self, samples: Sequence[Sample]) -> list[Grade]:
        return [grade for grade, _ in self._grade(samples, read_answers=False)]

    def close(self) -> None:
        """Ends the child processes and all processes that they started; a later call starts new ones."""
        with ThreadPoolExecutor(len(self._workers)) as threads:
            list(threads.map(_GradingProcess.close, self._workers))

    def _grade(self, samples: Sequence[Sample], read_answers: bool) -> list[GradeAndAnswer]:
        """Distributes the calls over all workers, which run in parallel.

        A call grades one sample, or all samples of one prompt.
        """
        calls = [[index] for index in range(len(samples))]
        if not self._is_ours and len(samples) > 1 and self._workers[0].takes_groups():
            by_prompt = groupby(range(len(samples)), lambda place: _key(samples[place]))
            calls = [list(places) for _, places in by_prompt]
        count = min(len(self._workers), max(1, len(calls)))
        graded: list[GradeAndAnswer] = [(0.0, None)] * len(samples)

        def grade_share(first: int) -> None:
            share = calls[first::count]
            asked = [[samples[place] for place in places] for places in share]
            for places, found in zip(
                share, self._workers[first].grade_calls(asked, read_answers), strict=True
            ):
                for place, grade in zip(places, found, strict=True):
                    graded[place] = grade

        started = time.monotonic()
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(grade_share, range(count)))
        self._advise(time.monotonic() - started, count)
        return graded

    def _advise(self, elapsed_s: float, count: int) -> None:
        """Says once that calls mostly waited one after the other."""
        waited_s = sum(worker.take_waited() for worker in self._workers) / count
        if not self._has_advised and waited_s > max(_LONG_WAIT_S, elapsed_s / 2):
            self._has_advised = True
            advice = "make it `async`, or set reward.threads if it may run in several threads"
            _log.warning("%s waited for %.1f s, one call after the other: %s", self._name, waited_s, advice)

    def _test_ground_truths(self, samples: Iterable[Sample]) -> None:
        """Fills `_wrong_scores`: the score of a wrong response, for each new ground truth.

        It is 0, or the score that a user's function gives an empty response if that is negative. It is None
        if the ground truth does not score 1 within the limits.
        """
        if len(self._wrong_scores) > _MAX_TESTED:
            self._wrong_scores.clear()
        untested = {key: sample for sample in samples if (key := _key(sample)) not in self._wrong_scores}
        self._wrong_scores |= dict.fromkeys(untested)
        answer_of = (lambda truth: accepted_answers(truth)[0]) if self._is_ours else str
        right: dict[str, Sample] = {}
        for form in _AS_RESPONSE:
            asked = [replace(s, response=form.format(answer_of(s.ground_truth))) for s in untested.values()]
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
    """Number of processes that this rank may run: its share of the cores, at most `MAX_WORKERS`."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // max(1, ranks_here)))


def _key(sample: Sample) -> str:
    """All that a grading depends on except the response, as text."""
    return json.dumps(asdict(replace(sample, response="", response_ids=())), default=str)


def _check_packages(reply: dict[str, Any]) -> None:
    """Raises MissingPackage if a built-in grader could not import a package."""
    module = reply["missing"]
    if module:
        raise MissingPackage(module)


class _GradingProcess:
    """A process of `rlctl.reward.fork_server`, started at its first use and again after it has ended."""

    def __init__(self, grader: str, params: dict[str, Any], deadline_s: float, threads: int = 1) -> None:
        self._grader = grader
        self._threads = threads
        self._at_once = 1
        self._waited_s = 0.0
        self._params = params
        self._deadline_s = deadline_s
        self._is_ours = is_ours(grader)
        self._process: ForkedProcess | None = None
        self._pid = 0  # of the process that grades
        self._number = 0  # of the current request
        self._takes_groups = False
        self.asks: tuple[str, ...] = ()  # what the function needs of every row
        #: the grader can extract answers from responses
        self.reads_answers = self._is_ours and GRADERS.part(grader).answer_of is not None

    def takes_groups(self) -> bool:
        """Whether the grader must be called with all responses to a prompt."""
        with contextlib.suppress(UsageError):  # grading reports the error again
            self.start()
        return self._takes_groups

    def take_waited(self) -> float:
        """Seconds for which single calls have waited since the last time."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    def grade_calls(
        self, calls: Sequence[Sequence[Sample]], read_answers: bool
    ) -> list[list[GradeAndAnswer]]:
        """Grades the samples of each call: at the same time, if the function waits, and else one by one.

        A call that ended its process, or had to share its time with others, is made again alone.
        """
        with contextlib.suppress(UsageError):  # grading reports it
            self.start()
        graded = self._together(calls, read_answers) if self._at_once > 1 and len(calls) > 1 else {}
        return [
            graded[place] if place in graded else self.grade(samples, read_answers)
            for place, samples in enumerate(calls)
        ]

    def _together(
        self, calls: Sequence[Sequence[Sample]], read_answers: bool
    ) -> dict[int, list[GradeAndAnswer]]:
        """The grades of the calls that are known after they were made at the same time."""
        replies: dict[int, dict[str, Any]] = {}

        def take(reply: dict[str, Any]) -> bool:
            replies[reply["call"]] = reply
            return len(replies) == len(calls)

        asked = {
            "calls": [[asdict(sample) for sample in samples] for samples in calls],
            "deadline_s": self._deadline_s,
            "threads": self._at_once,
        }
        most = MAX_REPLY_BYTES * sum(map(len, calls))
        # The process itself ends a call of an `async` function at the limit.
        self._ask(asked, self._deadline_s + _RESPONSE_S, most, take)
        graded = {}
        for place, reply in replies.items():
            if not {found.get("kind") for found in reply["grades"]} & {"memory", "busy"}:
                graded[place] = self._read(calls[place], reply, read_answers)
        return graded

    def grade(self, samples: Sequence[Sample], read_answers: bool) -> list[GradeAndAnswer]:
        """Grades the samples of one call, and extracts answers if `read_answers`.

        After a crash or lack of memory in a process that was used before, a new process grades again: the
        cause may be state that earlier gradings left, or a user who killed the process.
        """
        is_used = self._process is not None
        graded = self._try(samples, read_answers)
        if is_used and _is_of(graded, {"memory", "crash"}):
            self.close()
            graded = self._try(samples, read_answers)
        if _is_of(graded, {"memory"}):
            self.close()
        if len(samples) > 1 and _is_of(graded, LIMITS):
            return [self._cause(sample, grade) for sample, (grade, _) in zip(samples, graded, strict=True)]
        return graded

    def _cause(self, sample: Sample, of_group: Grade) -> GradeAndAnswer:
        """The failure of one sample of a group whose call reached a limit or crashed.

        A sample that does so alone is the cause. The others have no grade: a function of a group may compare
        its responses, so a grade of one alone would be another one.
        """
        [(grade, _)] = self.grade([sample], read_answers=False)
        if isinstance(grade, Failure) and grade.kind in LIMITS:
            return grade, None
        reason = of_group.text if isinstance(of_group, Failure) else ""
        return Failure(f"the call with all responses to this prompt failed: {reason}"), None

    def start(self) -> None:
        """Starts the process and loads the grader, unless it is running.

        Raises:
            UsageError: the grader cannot be loaded.
        """
        if self._process is not None:
            return
        leftovers.keep_temporary_files()  # of programs that it runs
        try:
            self._process = fork_server.start(self._grader, self._params, is_ours=self._is_ours)
        except fork_server.ServerEnded as error:
            how = "takes too long" if error.is_slow else "failed: the process has ended"
            raise self._not_loaded(how) from error
        self._number = -1
        self._pid = 0
        reply = self._ask(None, START_DEADLINE_S)
        if isinstance(reply, Failure):
            raise self._not_loaded("takes too long" if reply.kind == "time-out" else f"failed: {reply.text}")
        if "what" in reply:
            self.close()
            raise UsageError(reply["what"], where=reply["where"], fix=reply["fix"])
        self._pid = reply["pid"]
        self._takes_groups = reply["takes_groups"]
        self.reads_answers = reply["reads_answers"]
        self.asks = tuple(reply["asks"])
        self._at_once = max(reply["at_once"], 1 if self._is_ours else self._threads)

    def _not_loaded(self, how: str) -> UsageError:
        fix = "import it in Python to see the full error"
        return UsageError(f"importing it {how}", where=self._grader, fix=fix)

    def close(self) -> None:
        """Ends the process and all processes that it started."""
        process = self._process
        self._process = None
        if process is not None:
            process.close()

    def _try(self, samples: Sequence[Sample], read_answers: bool) -> list[GradeAndAnswer]:
        try:
            self.start()
        except UsageError as error:  # it was loadable when the run started
            return [(Failure(str(error), "machine"), None)] * len(samples)
        asked = {"samples": [asdict(sample) for sample in samples]}
        reply = self._ask(asked, self._deadline_s * len(samples), MAX_REPLY_BYTES * len(samples))
        if isinstance(reply, Failure):
            return [(reply, None)] * len(samples)
        _check_packages(reply)
        self._waited_s += reply["waited_s"]
        return self._read(samples, reply, read_answers)

    def _read(
        self, samples: Sequence[Sample], reply: dict[str, Any], read_answers: bool
    ) -> list[GradeAndAnswer]:
        """The grades of a reply, with answers if `read_answers`."""
        graded: list[GradeAndAnswer] = []
        for sample, found in zip(samples, reply["grades"], strict=True):
            if "error" in found:
                graded.append((Failure(found["error"], found.get("kind", "error")), None))
                continue
            answer = None
            if read_answers and self._process is not None:
                read = self._ask({"answer_of": sample.response}, self._deadline_s)
                if not isinstance(read, Failure):  # else the score stays valid
                    _check_packages(read)
                    answer = read["answer"]
            graded.append((float(found["score"]), answer))
        return graded

    def _ask(
        self,
        request: dict[str, Any] | None,
        deadline_s: float,
        max_bytes: int = MAX_REPLY_BYTES,
        take: Callable[[dict[str, Any]], bool] = lambda reply: True,
    ) -> dict[str, Any] | Failure:
        """Sends a request and returns its reply; on failure ends the process and returns a `Failure`.

        Without a request, waits for the first message. The deadline is processor time for a built-in grader
        that is loaded, else wall-clock time. `take` gets each reply, and says whether it is the last one; the
        deadline counts from the one before.
        """
        process = self._process
        if process is None:
            raise AssertionError("the grading process was started")
        self._number += 1
        waiting = b""
        if request is not None:
            waiting = json.dumps({"number": self._number, **request}, default=str).encode() + b"\n"
        inward = process.requests.fileno()
        outward = process.replies.fileno()
        os.set_blocking(inward, False)  # the process may never read
        started = time.monotonic()
        cpu_started = cpu_seconds(self._pid)
        received = b""
        num_bytes = 0
        outcome: dict[str, Any] | Failure | None = None
        while outcome is None:
            left = self._time_left(deadline_s, started, cpu_started)
            if isinstance(left, Failure):
                outcome = left
                break
            poll = select.poll()
            poll.register(outward, select.POLLIN)
            if waiting:
                poll.register(inward, select.POLLOUT)
            ready = dict(poll.poll(1000.0 * left + 1.0))
            if inward in ready:
                waiting = _unsent(inward, waiting)
            if outward not in ready:
                continue
            part = os.read(outward, 1 << 16)
            num_bytes += len(part)
            *lines, received = (received + part).split(b"\n")
            for reply in map(self._reply, lines):
                started = time.monotonic() if reply else started
                if isinstance(reply, Failure) or (reply and take(reply)):
                    outcome = reply
                    break
            if outcome is None and not part:
                outcome = Failure("the grading process has ended", "crash")
            elif outcome is None and num_bytes > max_bytes:
                text = f"the grading process replied with more than {max_bytes >> 20} MiB"
                outcome = Failure(text, "crash")
        if isinstance(outcome, Failure):
            self.close()
        return outcome

    def _time_left(self, deadline_s: float, started: float, cpu_started: float) -> float | Failure:
        """Seconds until the deadline must be checked again; a `Failure` if it has passed."""
        elapsed = time.monotonic() - started
        left = deadline_s - elapsed
        if self._pid and self._is_ours:
            # Built-in graders only compute, and their processor time does not depend on the load of the
            # machine. A user's function may wait for a server.
            left = max(left, deadline_s - (cpu_seconds(self._pid) - cpu_started))
            if elapsed > STALLED * deadline_s:
                text = "the machine was too busy: the grading got no processor time"
                return Failure(text, "machine")
        return left if left > 0.0 else Failure(f"the grading took longer than {deadline_s:g} s", "time-out")

    def _reply(self, line: bytes) -> dict[str, Any] | Failure | None:
        """Parses a line as the reply to the current request; None if it is not one."""
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


def _unsent(pipe: int, message: bytes) -> bytes:
    """What is left of a message after a write to a pipe; nothing, if nobody reads it any more."""
    try:
        return message[os.write(pipe, message) :]
    except BlockingIOError:
        return message
    except BrokenPipeError:  # the reply pipe is closed, too
        return b""


def _is_of(graded: Sequence[GradeAndAnswer], kinds: Collection[str]) -> bool:
    return any(isinstance(grade, Failure) and grade.kind in kinds for grade, _ in graded)
