"""Run a program nobody trusts in a process of its own, and see what it did. Linux only.

What the process may do is written in `confine.py` and `seccomp.py`; `docs/how-to/rewards.md` says what that
does not prevent.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlctl.errors import EnvironmentFailure

JAIL = Path(__file__).with_name("jail.py")
#: Libraries that would start a thread per core get one: threads count against the memory limit.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

#: Tries the network.
PROBE = """
import socket
try:
    socket.socket()
    print("open")
except PermissionError:
    print("confined")
"""

#: (`eval`, expression) reports the expression's value; (`exec`, statements) has to go through.
Step = tuple[Literal["eval", "exec"], str]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may take."""

    timeout_s: float  # seconds on the wall
    memory_mb: int  # MiB of address space, the interpreter's included


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program did.

    Attributes:
        refused: why the sandbox could not be set up; None: the program ran.
        exit_code: of the process; negative: the signal that ended it.
        timed_out: it was killed for taking too long.
        stdout: what it printed, at most 16 MiB.
        values: of the `eval` steps that were reached, as `jail.encode` writes them.
        finished: all steps went through.
    """

    refused: str | None
    exit_code: int
    timed_out: bool
    stdout: str
    values: list[Any] = field(default_factory=list)
    finished: bool = False


def run_program(program: str, limits: Limits, *, stdin: str = "", steps: Sequence[Step] = ()) -> Outcome:
    """Run Python source in a new process, confined, in a temporary directory that is removed afterwards.

    Args:
        program: Python source; run as a script, or, with steps, as a module.
        limits: time and memory; a program that reaches them is ended.
        stdin: its standard input.
        steps: evaluated after the program, in its name space.
    """
    token = secrets.token_hex(16)
    job = {
        "program": program,
        "steps": steps,
        "token": token,
        "memory_bytes": limits.memory_mb << 20,
        "cpu_s": math.ceil(limits.timeout_s) + 1,  # should this process be gone when the time is up
    }
    with tempfile.TemporaryDirectory(prefix="rlctl-code-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        (place / "work").mkdir()
        (place / "job").write_text(json.dumps(job), encoding="ascii")
        (place / "stdin").write_text(stdin, encoding="utf-8", errors="replace", newline="")
        exit_code = _run_jail(place, limits.timeout_s)
        return Outcome(
            exit_code=-signal.SIGKILL if exit_code is None else exit_code,
            timed_out=exit_code is None,
            stdout=(place / "stdout").read_text(encoding="utf-8", errors="replace"),
            **_read_reply((place / "reply").read_bytes(), token),
        )


def check_sandbox(limits: Limits) -> None:
    """Run a program that tries the network, to see that it runs and that it cannot.

    Raises:
        EnvironmentFailure: responses cannot be run safely on this machine; says why.
    """
    outcome = run_program(PROBE, limits)
    why = outcome.refused
    if why is None and outcome.stdout == "open\n":
        why = "a program could open a socket"
    elif why is None and outcome.stdout != "confined\n":
        why = f"a small program ended with code {outcome.exit_code} under the limits of reward.code"
    if why:
        raise EnvironmentFailure(
            f"responses cannot be run safely here: {why}",
            where="reward.name=code",
            fix="use Linux on x86_64 or aarch64 that lets processes install seccomp filters, and limits "
            "under which Python starts; or grade with a function of your own (reward.name=file.py:function)",
        )


def _run_jail(place: Path, timeout_s: float) -> int | None:
    """Exit code; None if it was killed for its time.

    It reads and writes files, not pipes: their size is limited, and nobody waits for the other end.
    """
    with (
        (place / "job").open("rb") as job,
        (place / "reply").open("wb") as reply,
        (place / "stdin").open("rb") as stdin,
        (place / "stdout").open("wb") as stdout,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", str(JAIL), str(job.fileno()), str(reply.fileno())],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            cwd=place / "work",
            env=ENVIRONMENT,
            pass_fds=(job.fileno(), reply.fileno()),
            start_new_session=True,
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:  # also on Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read_reply(reply: bytes, token: str) -> dict[str, Any]:
    """The parts of `Outcome` that the jail reports; stops at what the jail cannot have written."""
    parts: dict[str, Any] = {
        "refused": "its process ended before it was confined",
        "values": [],
        "finished": False,
    }
    for line in reply.splitlines():
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            break
        match message:
            case {"ready": True}:
                parts["refused"] = None
            case {"refused": str(why)} if parts["refused"]:
                parts["refused"] = why
            case {"value": value}:
                parts["values"].append(value)
            case {"token": str(given)}:
                parts["finished"] = secrets.compare_digest(given.encode(), token.encode())
    return parts
