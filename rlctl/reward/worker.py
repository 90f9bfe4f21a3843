"""A grading process: one JSON line in, a grade out, and an end to itself when a grading takes too long.

Run as `python -m rlctl.reward.worker GRADER DEADLINE_S`; `rlctl.reward.pool` starts and feeds it. Its first
line says whether the grader could be loaded. For each sample it writes a line with the score or the error,
and then, if the answer is asked for and there is a score, a line with the answer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Mapping
from numbers import Real

from rlctl.errors import UsageError
from rlctl.reward.function import text_of
from rlctl.reward.graders import GRADERS, answer_of, load_grader
from rlctl.reward.protocol import Sample

MEMORY_LIMIT_BYTES = 4 << 30
START_DEADLINE_S = 60.0
#: A grading that is given so little processor time that it takes this many deadlines by the clock is ended.
STALLED = 10.0


def main(grader: str, deadline_s: float) -> None:
    """Grade until the input ends, which it does when the parent goes away."""
    # Replies get a descriptor of their own, so that whatever a library prints cannot mix with them.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the trainer finishes its step first
    # The default action of these signals ends the process from the kernel, which reaches where no Python
    # handler does: inside one huge integer power. The parent sees the end of the pipe.
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGPROF})
    # A user's function may import libraries that reserve address space by the tens of GiB: what counts
    # for it is memory that can be written to.
    limit = resource.RLIMIT_AS if grader in GRADERS else resource.RLIMIT_DATA
    resource.setrlimit(limit, (MEMORY_LIMIT_BYTES, resource.RLIM_INFINITY))

    def start_clock() -> None:
        # Our own graders only compute: what they take in processor time does not depend on how busy the
        # machine is. A user's function may wait, for a server.
        if grader in GRADERS:
            signal.setitimer(signal.ITIMER_PROF, deadline_s)
        signal.setitimer(signal.ITIMER_REAL, deadline_s * (STALLED if grader in GRADERS else 1.0))

    def reply(values: dict[str, object]) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    signal.setitimer(signal.ITIMER_REAL, START_DEADLINE_S)
    try:
        grade = load_grader(grader)
    except UsageError as error:
        reply({"what": error.what, "where": error.where, "fix": error.fix})
        return
    if grader in GRADERS:  # pay for late imports now; a failure shows again, with its text, when grading
        with contextlib.suppress(Exception):
            grade(Sample("\\boxed{x + 1}", "\\frac{x}{2}"))
    reply({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        sample = Sample(**asked["sample"])
        start_clock()
        try:
            values = checked(grade(sample))
        except MemoryError:
            values = {
                "error": f"the grading needs more than {MEMORY_LIMIT_BYTES >> 30} GiB",
                "kind": "memory",
            }
        except Exception as error:
            values = {"error": text_of(error)}
        reply(values)
        if asked["read_answer"] and "score" in values:
            start_clock()
            answer = None
            with contextlib.suppress(Exception):  # the score stands
                answer = answer_of(grader, sample.response)
            reply({"answer": answer})


def checked(value: object) -> dict[str, object]:
    """The reply for what a grader returned: a finite number, or an error saying what it was.

    Of a mapping `score` counts, as verl's reward functions return it; the rest of it is left unread.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            return {"error": f"the grader returned a dict without `score`: {repr(value)[:200]}"}
        value = value["score"]
    if getattr(value, "ndim", None) == 0:  # a scalar of NumPy or PyTorch
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real):
        return {
            "error": f"the grader returned {repr(value)[:200]} of type {type(value).__name__}, not a number"
        }
    score = float(value)
    return {"score": score} if math.isfinite(score) else {"error": f"the grader returned {score}"}


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
