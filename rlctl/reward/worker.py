"""A grading process: one JSON line in, one out, and an end to itself when a grading takes too long.

Run as `python -m rlctl.reward.worker GRADER DEADLINE_S`; `rlctl.reward.pool` starts and feeds it. Its
first line says whether the grader could be loaded.
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


def main(grader: str, deadline_s: float) -> None:
    """Grade until the input ends, which it does when the parent goes away."""
    # Replies get a descriptor of their own, so that whatever a library prints cannot mix with them.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the trainer finishes its step first
    # The alarm's default action ends the process from the kernel, which reaches where no Python handler
    # does: inside one huge integer power. The parent sees the end of the pipe.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    # A user's function may import libraries that reserve address space by the tens of GiB: what counts
    # for it is memory that can be written to.
    limit = resource.RLIMIT_AS if grader in GRADERS else resource.RLIMIT_DATA
    resource.setrlimit(limit, (MEMORY_LIMIT_BYTES, resource.RLIM_INFINITY))

    def reply(values: dict[str, object]) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
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
            grade(Sample("1", "1"))
    reply({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        sample = Sample(**asked["sample"])
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        try:
            values = checked(grade(sample))
            if asked["read_answer"] and "score" in values:
                values["answer"] = answer_of(grader, sample.response)
        except Exception as error:
            values = {"error": text_of(error)}
        reply(values)


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
