"""Grading process: reads numbered requests and writes numbered replies, one JSON object per line.

Run as `python -P -m rlctl.reward.worker GRADER PARAMETERS`; `rlctl.reward.pool` starts it and enforces the
deadlines. There are two processes. The first one is a supervisor: when the pool or the second process ends,
it ends the second process and all processes that it started. The second one grades.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import select
import sys
import traceback
from collections.abc import Mapping
from numbers import Real
from typing import Any

MEMORY_LIMIT_BYTES = 4 << 30
#: Maximum characters of an error that are sent: the last ones.
MAX_ERROR_CHARS = 4000
_PR_SET_CHILD_SUBREAPER = 36


def main(grader: str, params: dict[str, Any]) -> None:
    """Grades until the input ends, which happens when the pool's process ends."""
    # Separate descriptors for requests and replies, so that the grader's input and output cannot mix with
    # them.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    # Descendants whose parent has ended become children of this process, also those in another session.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        _serve(grader, params, requests, replies)
        return
    code = _wait(child, requests)
    _end_children()
    if code is not None:
        os.write(replies, json.dumps({"ended": code}).encode() + b"\n")
    os._exit(0)


def _wait(child: int, requests: int) -> int | None:
    """Waits for the child's exit code, negative for a signal; returns None if the pool has ended."""
    poll = select.poll()
    poll.register(requests, 0)  # reports only that no process can write to it any more
    wait_ms = 1000
    try:
        poll.register(os.pidfd_open(child), select.POLLIN)
    except OSError:  # a kernel before 5.3, or a container that refuses it
        wait_ms = 50
    while True:
        events = poll.poll(wait_ms)
        while (found := os.waitpid(-1, os.WNOHANG))[0]:  # also orphans of the grader
            if found[0] == child:
                return os.waitstatus_to_exitcode(found[1])
        if any(fd == requests for fd, _ in events):
            return None


def _end_children() -> None:
    """Ends every process that the grader started; children of ended ones become children of this process."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                import psutil

                for child in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                os.wait()


def _serve(grader: str, params: dict[str, Any], requests: int, replies: int) -> None:
    from rlctl.errors import UsageError
    from rlctl.reward.function import load_grader
    from rlctl.reward.pool import is_ours
    from rlctl.reward.protocol import Sample

    me = os.getpid()
    # A user's function may import libraries that reserve tens of GiB of address space, so only writable
    # memory counts for it.
    limit = resource.RLIMIT_AS if is_ours(grader) else resource.RLIMIT_DATA
    resource.setrlimit(limit, (MEMORY_LIMIT_BYTES, resource.RLIM_INFINITY))

    def reply(number: int, **values: object) -> None:
        if os.getpid() != me:  # a copy of this process that the grader has forked
            os._exit(0)
        line = json.dumps({"number": number, **values}).encode() + b"\n"
        while line:
            line = line[os.write(replies, line) :]

    sys.path.append(os.getcwd())  # noqa: PTH109
    try:
        loaded = load_grader(grader, params)
    except UsageError as error:
        reply(0, what=error.what, where=error.where, fix=error.fix)
        return
    if is_ours(grader):  # runs lazy imports now; an error occurs again, and is reported, when grading
        with contextlib.suppress(Exception):
            loaded.grade([Sample("\\boxed{x + 1}", "\\frac{x}{2}")])
    reply(0, pid=me, takes_groups=loaded.takes_groups, reads_answers=loaded.answer_of is not None)
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            asked = json.loads(line)
            if "answer_of" in asked:
                answer = None
                with contextlib.suppress(Exception):  # the score is valid without an answer
                    answer = loaded.answer_of(asked["answer_of"]) if loaded.answer_of else None
                reply(asked["number"], answer=answer)
                continue
            try:
                samples = [Sample(**one) for one in asked["samples"]]
                # None from a TRL function means that it does not grade the sample; from others it is an
                # error.
                skipped = {"error": "the grader returned None", "kind": "inapplicable"}
                values = loaded.grade(samples)
                grades = [skipped if loaded.takes_groups and v is None else checked(v) for v in values]
            except MemoryError:
                text = f"the grading needs more than {MEMORY_LIMIT_BYTES >> 30} GiB"
                grades = [{"error": text, "kind": "memory"}] * len(asked["samples"])
            except Exception as error:
                grades = [{"error": text_of(error)}] * len(asked["samples"])
            reply(asked["number"], grades=grades)


def text_of(error: BaseException) -> str:
    """The traceback, starting at the first frame outside this package."""
    trace, ours = error.__traceback__, os.path.dirname(__file__)  # noqa: PTH120
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))[-MAX_ERROR_CHARS:]


def checked(value: object) -> dict[str, object]:
    """Converts a grader's result to a reply: a finite number, or an error that describes the result.

    If the result is a mapping, as verl's reward functions return, only its `score` is used.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            return {"error": f"the grader returned a dict without `score`: {repr(value)[:200]}"}
        value = value["score"]
    if getattr(value, "ndim", None) == 0:  # a scalar of NumPy or PyTorch
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real):
        what = f"{repr(value)[:200]} of type {type(value).__name__}"
        return {"error": f"the grader returned {what}, not a number"}
    score = float(value)
    return {"score": score} if math.isfinite(score) else {"error": f"the grader returned {score}"}


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
