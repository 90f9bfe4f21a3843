"""Output of commands, progress of waiting processes, and child processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
#: Environment variable with a parent's process id, for child processes that call `end_with_parent`.
PARENT = "RLCTL_PARENT"
_progress = [0]


def note_progress() -> None:
    """Record progress of work that this process only waits for, so that it is not taken for a hang."""
    _progress[0] += 1


def progress() -> int:
    """Number of calls of `note_progress`."""
    return _progress[0]


def command_output(*command: str, timeout_s: float = 10.0) -> str:
    """A command's standard output, stripped; empty if the command is missing, fails or times out."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Let the kernel signal this process when its parent ends, even by SIGKILL. Does nothing outside Linux.

    Args:
        number: the signal.
        parent: process id that the parent reported. If `os.getppid()` differs, the parent has already ended,
            and the signal is sent at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
