"""A grading process: one JSON line in, one out, and an end to itself when a grading takes too long.

Run as `python -m rlctl.reward.worker GRADER DEADLINE_S`; `rlctl.reward.pool` starts and feeds it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback

from rlctl.reward.graders import GRADERS, Grader

MEMORY_LIMIT_BYTES = 4 << 30


def main(grader_name: str, deadline_s: float) -> None:
    """Grade until the input ends, which it does when the parent goes away."""
    # Replies get a descriptor of their own, so that whatever a library prints cannot mix with them.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the trainer finishes its step first
    # The alarm's default action ends the process from the kernel, which reaches where no Python handler
    # does: inside one huge integer power. The parent sees the end of the pipe.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, resource.RLIM_INFINITY))
    grade = {str(name): grader for name, grader in GRADERS.items()}[grader_name]
    _warm_up(grade)
    for line in sys.stdin:
        response, ground_truth = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        try:
            reply: dict[str, object] = {"score": grade(response, ground_truth)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _warm_up(grade: Grader) -> None:
    """Pay for imports before the first deadline runs; a failure shows again, with its text, when grading."""
    try:
        grade("1", "1")
    except Exception:
        return


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
