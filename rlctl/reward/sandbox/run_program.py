"""Runs an untrusted program in a confined process and returns the outcome. Linux only.

`confine.py` defines what the process may do; `docs/how-to/rewards.md` lists what it does not prevent.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlctl.errors import EnvironmentFailure
from rlctl.leftovers import temporary_directory

JAIL = Path(__file__).with_name("jail.py")
#: Maximum bytes read from a program's output and reply.
MAX_OUTPUT_BYTES = 1 << 20
#: One thread for libraries that would start one per core, because threads count against the memory limit.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

#: A program that tries to open a socket.
PROBE = """
import socket
try:
    socket.socket()
    print("open")
except PermissionError:
    print("confined")
"""

#: (`eval`, expression) returns the expression's value; (`exec`, statements) must run without an exception.
Step = tuple[Literal["eval", "exec"], str]


@dataclass(frozen=True, slots=True)
class Limits:
    """Time and memory limits of a program."""

    timeout_s: float  # wall-clock time, seconds
    memory_mb: int  # MiB of address space, the interpreter's included


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a program."""

    refused: str | None  # reason why the sandbox could not be set up; None: the program ran
    exit_code: int  # of the program, or of its tests; negative: the signal that ended the process
    timed_out: bool  # it was killed at the time limit
    stdout: str  # what it printed, at most `max_output` bytes
    values: list[Any]  # of the `eval` steps that were reached, as `jail.encode` writes them
    passed: bool  # the test code ran without an exception


def run_program(
    program: str,
    limits: Limits,
    *,
    stdin: str = "",
    steps: Sequence[Step] = (),
    tests: str = "",
    max_output: int = MAX_OUTPUT_BYTES,
) -> Outcome:
    """Runs Python source in a new confined process, in a temporary directory that is removed afterwards.

    Args:
        program: Python source; runs as a script, or as a module if there are steps or tests.
        limits: at the time limit the program is killed; beyond the memory limit allocations fail.
        stdin: its standard input.
        steps: evaluated after the program, in its namespace.
        tests: Python source; runs in a separate process, which uses the program through `peer.py`.
        max_output: maximum bytes read from its output, and from its values.
    """
    end = time.monotonic() + limits.timeout_s
    job = {
        "role": "program" if tests else "values" if steps else "script",
        "source": program,
        "steps": steps,
        "memory_bytes": limits.memory_mb << 20,
        "cpu_s": math.ceil(limits.timeout_s) + 1,  # in case this process ends before the time limit
    }
    with temporary_directory("code") as name:
        folders, jobs = [name / "program"], [job]
        if tests:
            folders.append(name / "tests")
            jobs.append(job | {"role": "tests", "source": tests})
        processes: list[subprocess.Popen[bytes]] = []
        exit_code: int | None = None
        try:
            ends = socket.socketpair()
            with ends[0], ends[1]:
                for folder, one, line in zip(folders, jobs, ends, strict=False):
                    processes.append(_start(folder, one, stdin, line.fileno() if tests else None))
            exit_code = processes[-1].wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:  # also on Ctrl-C
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        refused, messages = _read_replies(folders, max_output, max(1, len(steps)))
        stdout = _start_of(folders[0] / "stdout", max_output)
    return Outcome(
        refused=refused,
        exit_code=-signal.SIGKILL if exit_code is None else exit_code,
        timed_out=exit_code is None,
        stdout=stdout.decode(errors="replace"),
        values=[message.get("value") for message in messages],
        passed=bool(tests) and messages == [{"passed": True}],
    )


def check_sandbox(limits: Limits) -> None:
    """Runs a program that tries to open a socket, and checks that it runs and cannot open one.

    Raises:
        EnvironmentFailure: responses cannot be run safely on this machine, with the reason.
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
            "under which Python starts; or grade with your own function (reward.name=file.py:function)",
        )


def _start(folder: Path, job: dict[str, Any], stdin: str, line: int | None) -> subprocess.Popen[bytes]:
    """Starts a process of `jail.py`.

    It reads and writes files, not pipes, because the size of files is limited and no process waits for them.
    """
    (folder / "work").mkdir(parents=True)
    (folder / "job").write_text(json.dumps(job), encoding="ascii")
    (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace", newline="")
    with (
        (folder / "job").open("rb") as given,
        (folder / "reply").open("wb") as reply,
        (folder / "stdin").open("rb") as inward,
        (folder / "stdout").open("wb") as outward,
    ):
        fds = [given.fileno(), reply.fileno(), *([] if line is None else [line])]
        return subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", str(JAIL), *map(str, fds)],
            stdin=inward,
            stdout=outward,
            stderr=subprocess.DEVNULL,
            cwd=folder / "work",
            env=ENVIRONMENT,
            pass_fds=fds,
            start_new_session=True,
        )


def _start_of(file: Path, max_bytes: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(max_bytes)


def _read_replies(
    folders: Sequence[Path], max_bytes: int, max_messages: int
) -> tuple[str | None, list[dict[str, Any]]]:
    """Returns why a process was not confined, or None, and the later messages of the last process.

    Returns no messages if one is not from `jail.py`, or there are more than it can have written.
    """
    for folder in folders:
        first, *lines = _start_of(folder / "reply", max_bytes).split(b"\n", max_messages + 1)
        confined = json.loads(first or b"{}")  # written before the program ran
        if "ready" not in confined:
            return confined.get("refused", "its process ended before the sandbox was set up"), []
    try:
        messages = [json.loads(line) for line in lines if line]
    except (ValueError, RecursionError):
        return None, []
    is_ours = len(messages) <= max_messages and all(isinstance(message, dict) for message in messages)
    return None, messages if is_ours else []
