"""Ends processes together with everything that they started, however the process that wants them ends.

Processes that a user's code starts may leave its process group and session. A supervisor is a small parent
process to which the kernel gives such descendants when their own parent ends, so that none escapes:

    owner  ──channel──  supervisor  ──fork──  work  ──…──  what it starts

The supervisor ends them when the work ends, when the owner closes the channel or is killed, and at SIGTERM.
Linux only, as the sandbox; elsewhere orphans of the work are not found. Standard library only, because it is
forked for every episode.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rlctl.processes import children_of, end_with_parent

_PR_SET_CHILD_SUBREAPER = 36
#: Milliseconds between looks for orphans, and for the end of the work on kernels before 5.3.
_LOOK_MS, _LOOK_OFTEN_MS = 1000, 50


def supervise(
    work: Callable[[], object],
    channel: int,
    events: int = 0,
    *,
    grace_s: float = 0.0,
    keeps_orphans: bool = True,
) -> int | None:
    """Runs `work` in a child process, waits for it, and ends everything that it started.

    The child process ends with this one, and by `sys.exit`.

    Args:
        channel: a descriptor on which `select.poll` reports `events`, or that its other end is closed, once
            the owner has ended or wants the work to end.
        grace_s: seconds for which the work may go on after SIGTERM.
        keeps_orphans: descendants whose parent has ended live as long as the work; false: they are killed
            within a second, because only a supervisor that was killed leaves some.

    Returns:
        The exit code of the work, negative for a signal; None: it was ended.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    is_asked, asks = os.pipe()
    before = signal.signal(signal.SIGTERM, lambda *_: os.write(asks, b"+"))
    me = os.getpid()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, before)
        os.close(is_asked)
        os.close(asks)
        end_with_parent(signal.SIGKILL, me)
        work()
        sys.exit()
    code = _waited(child, {channel: events, is_asked: select.POLLIN}, grace_s, keeps_orphans=keeps_orphans)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_descendants()
    return code


def _waited(child: int, ends: dict[int, int], grace_s: float, *, keeps_orphans: bool) -> int | None:
    """The exit code of a child process; None if one of the descriptors was ready before it ended."""
    poll = select.poll()
    ended = -1
    for end, events in ends.items():
        poll.register(end, events)
    with contextlib.suppress(OSError):
        ended = os.pidfd_open(child)
        poll.register(ended, select.POLLIN)
    while True:
        ready = {end for end, _ in poll.poll(_LOOK_OFTEN_MS if ended < 0 else _LOOK_MS)}
        code = _reaped(child)
        if code is not None:
            return code
        if ready & ends.keys():
            break
        if not keeps_orphans:
            for pid in children_of(os.getpid()):
                if pid != child:
                    _kill(pid, os.getpid())
    if grace_s:
        os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and _reaped(child) is None:
        time.sleep(_LOOK_OFTEN_MS / 1000)
    return None


def _reaped(child: int) -> int | None:
    """The exit code of a child if it has ended; orphans that have ended leave the process table."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def end_descendants() -> None:
    """Kills all descendants of this process, which must get orphans, and waits for their end."""
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            me = os.getpid()
            for pid, parent in descendants(me):
                _kill(pid, parent)
            os.waitpid(-1, 0)


def _kill(pid: int, parent: int) -> None:
    """Kills a process if it still is a child of `parent`: its number may belong to another one by now."""
    with contextlib.suppress(ProcessLookupError):
        try:
            handle = os.pidfd_open(pid)
        except OSError as error:
            if isinstance(error, ProcessLookupError):
                raise
            os.kill(pid, signal.SIGKILL)  # a kernel before 5.3
            return
        try:
            if _parent_of(pid) == parent:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def descendants(pid: int) -> list[tuple[int, int]]:
    """Each descendant of a process and its parent, parents first; some may have ended."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal():
            children.setdefault(_parent_of(int(name)), []).append(int(name))
    known = list[tuple[int, int]]()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        known += [(child, parent) for child in children.get(parent, [])]
        waiting += children.get(parent, [])
    return known


def _parent_of(pid: int) -> int:
    """The parent of a process; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0
