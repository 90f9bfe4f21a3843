"""Other processes: what a command prints, and ending with the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
#: Environment variable in which a process names itself to one that it starts, for `end_with_parent`.
PARENT = "RLCTL_PARENT"
_progress = [0]


def note_progress() -> None:
    """Something that this process waits for goes on, though its own threads stand still: not a hang."""
    _progress[0] += 1


def progress() -> int:
    """How often `note_progress` was called."""
    return _progress[0]


def command_output(*command: str, timeout_s: float = 10.0) -> str:
    """A command's standard output, stripped; empty if it is missing, fails or takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Let the kernel signal this process when its parent ends, even by SIGKILL. Does nothing outside Linux.

    Args:
        number: the signal.
        parent: process id of the parent, as the parent itself says it: a child whose parent has ended already
            is told another one. Then the signal is sent at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
