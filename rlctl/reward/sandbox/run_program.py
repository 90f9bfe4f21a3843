"""Runs an untrusted program in a confined process and returns the outcome. Linux only.

`confine.py` and `system_calls.toml` define what the process may do; `docs/how-to/code-rewards.md` lists what
that does not prevent. Whatever a program does, there is an outcome: `NotRun` is raised before it starts, or
if the machine gives it too little processor time.
"""

from __future__ import annotations

import contextlib
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
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rlctl.errors import EnvironmentFailure
from rlctl.leftovers import temporary_directory
from rlctl.processes import cpu_seconds
from rlctl.processor_time import STALLED, WaitMeter, thread_waits
from rlctl.reward.sandbox import confine
from rlctl.reward.sandbox.system_calls import filter_program, rules_of

JAIL = Path(__file__).with_name("jail.py")
#: Maximum bytes read from a program's output and reply.
MAX_OUTPUT_BYTES = 1 << 20
#: Seconds until a new process must be confined, and seconds between looks at the times of a running one.
START_DEADLINE_S, TICK_S = 60.0, 0.1
#: Elapsed time of a program, in time limits, without that in which it waited for a processor.
ELAPSED = 3.0
#: Processor time of a session, if this process ends first.
_SESSION_CPU_S = 600
#: Bytes and files that a program may leave in its directory.
MAX_DISK_BYTES, MAX_FILES = 64 << 20, 1000
#: One thread for libraries that would start one per core, because threads count against the memory limit.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

#: A program that tries every system call that is denied, with arguments that no call accepts, and files.
PROBE = """
import ctypes, errno, os
libc, done = ctypes.CDLL(None, use_errno=True), []
for name, number in {denied}.items():
    result = libc.syscall(number, *[ctypes.c_long(-1)] * 6)
    if result != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        done.append(name)
for path, flags in {files}:
    try:
        os.open(path, flags)
    except PermissionError:
        continue
    done.append("open " + path)
print("could call", *done if done else ["nothing"])
"""

#: (`eval`, expression) returns the expression's value; (`exec`, statements) must run without an exception.
Step = tuple[Literal["eval", "exec"], str]


class NotRun(Exception):
    """The machine could not run a program, whatever the program is; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time and memory limits of a program."""

    timeout_s: float  # processor time, seconds; see `_Meter`
    memory_mb: int  # MiB of address space, the interpreter's included


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """ProgramOutcome of a program."""

    exit_code: int  # of the program, or of its tests; negative: the signal that ended the process
    reached_limit: bool  # it was ended, at the limit of time, of files or of messages
    stdout: str  # what it printed, at most `max_output` bytes
    values: list[Any]  # of the `eval` steps that were reached, as `jail.encode` writes them
    passed: bool  # the test code ran without an exception


def run_program(
    program: str,
    limits: Limits,
    *,
    prelude: str = "",
    stdin: str = "",
    steps: Sequence[Step] = (),
    tests: str = "",
    max_output: int = MAX_OUTPUT_BYTES,
) -> ProgramOutcome:
    """Runs Python source in a new confined process, in a temporary directory that is removed afterwards.

    Args:
        program: Python source; runs as a script, or as a module if there are steps or tests.
        limits: at the time limit, which starts again after each value of a step, the program is killed;
            beyond the memory limit allocations fail.
        prelude: Python source that runs before the program, and before the tests, in the same names.
        stdin: its standard input.
        steps: evaluated after the program, in its namespace.
        tests: Python source; runs in a separate process, which uses the program through `peer.py`.
        max_output: maximum bytes read from its output, and from its values.

    Raises:
        NotRun: the process could not be confined, or got too little processor time.
    """
    num_messages = 1 if tests else sum(kind == "eval" for kind, _ in steps)
    settings: dict[str, Any] = {
        "memory_bytes": limits.memory_mb << 20,
        "cpu_s": math.ceil(limits.timeout_s * max(1, num_messages)) + 1,  # if this process ends first
        "has_landlock": confine.landlock_version() > 0,
    }
    roles = ("program", "tests") if tests else ("values" if steps else "script",)
    jails: list[_Jail] = []
    try:
        settings["filter"] = _filter(has_landlock=settings["has_landlock"])
        with temporary_directory("code", is_kept=False) as folder:
            try:
                ends = socket.socketpair()
                with ends[0], ends[1]:
                    for role, end in zip(roles, ends, strict=False):
                        jails.append(
                            _Jail(folder / role, stdin, settings | {"role": role}, end if tests else None)
                        )
                for jail in jails:
                    jail.await_confinement()
                meter = _Meter([jail.process.pid for jail in jails], limits.timeout_s)
                for jail, source in zip(jails, (program, tests), strict=False):
                    jail.say({"source": source, "steps": steps, "prelude": prelude})
                reply = jails[-1].reply(meter, num_messages, max_output)
            finally:
                for jail in jails:  # also on Ctrl-C
                    jail.end()
            with (folder / roles[0] / "stdout").open("rb") as file:
                stdout = file.read(max_output).decode(errors="replace")
    except OSError as error:
        raise NotRun(f"a program could not be started: {error}") from error
    messages = _messages(reply or b"")
    return ProgramOutcome(
        exit_code=jails[-1].process.returncode,
        reached_limit=reply is None,
        stdout=stdout,
        values=[message.get("value") for message in messages],
        passed=bool(tests) and messages == [{"passed": True}],
    )


class SessionEnded(Exception):
    """The interpreter reached a limit or ended itself; its state is lost."""


class Session:
    """A confined interpreter that runs one source after the other and keeps their names.

    Raises:
        NotRun: the process could not be confined.
    """

    def __init__(self, limits: Limits) -> None:
        has_landlock = confine.landlock_version() > 0
        settings = {
            "memory_bytes": limits.memory_mb << 20,
            "cpu_s": _SESSION_CPU_S,
            "has_landlock": has_landlock,
            "filter": _filter(has_landlock=has_landlock),
            "role": "session",
        }
        self._limits = limits
        self._ends = contextlib.ExitStack()
        try:
            folder = self._ends.enter_context(temporary_directory("code"))
            self._jail = _Jail(folder / "session", "", settings, None)
            self._ends.callback(self._jail.end)
            self._jail.await_confinement()
        except OSError as error:
            self.close()
            raise NotRun(f"a program could not be started: {error}") from error
        except NotRun:
            self.close()
            raise

    def run(self, source: str, most: int) -> str:
        """What the source printed, at most `most` characters, with a last expression's value or the error.

        Raises:
            SessionEnded: see there.
            NotRun: it got too little processor time.
        """
        try:
            meter = _Meter([self._jail.process.pid], self._limits.timeout_s)
            self._jail.say({"source": source, "most": most})
            reply = self._jail.line(meter, 16 * most + MAX_OUTPUT_BYTES)
            output = json.loads(reply or b"{}")["output"]
            if isinstance(output, str):
                return output
        except (OSError, ValueError, LookupError, TypeError):
            pass
        except NotRun:
            self.close()
            raise
        self.close()
        raise SessionEnded

    def close(self) -> None:
        """Ends the process, and removes its files."""
        self._ends.close()


def check_sandbox(limits: Limits) -> None:
    """Runs a program that tries each denied system call and to open files, and checks that it cannot.

    Raises:
        EnvironmentFailure: responses cannot be run safely on this machine, with the reason.
    """
    has_landlock = confine.landlock_version() > 0
    files = [("../stdin", os.O_RDWR)]
    if has_landlock:
        files.append((f"/proc/{os.getpid()}/environ", os.O_RDONLY))
    why = ""
    try:
        rules = rules_of(has_landlock=has_landlock)
        denied = {name: rule.number for name, rule in rules.items() if rule.allowed_if != [[]]}
        outcome = run_program(PROBE.format(denied=denied, files=files), limits)
        if outcome.exit_code:
            why = f"a small program ended with code {outcome.exit_code} under the limits of reward.code"
        elif outcome.stdout != "could call nothing\n":
            why = f"a program {outcome.stdout.strip()}"
    except (NotRun, OSError) as error:
        why = str(error)
    if why:
        raise EnvironmentFailure(
            f"responses cannot be run safely here: {why}",
            where="reward.name=code",
            fix="use Linux on x86_64 or aarch64 that lets processes install seccomp filters, and limits "
            "under which Python starts; or grade with your own function (reward.name=file.py:function)",
        )


@lru_cache
def _filter(*, has_landlock: bool) -> str:
    return filter_program(rules_of(has_landlock=has_landlock).values()).hex()


class _Jail:
    """A process of `jail.py`, and the line to it.

    Its input and output are files, not pipes: their size is limited and no process waits for them. What it
    sends over the line cannot be taken back.
    """

    def __init__(
        self, folder: Path, stdin: str, settings: dict[str, Any], peer: socket.socket | None
    ) -> None:
        self._work = folder / "work"
        self._work.mkdir(parents=True)
        (folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace", newline="")
        self._line, theirs = socket.socketpair()
        with theirs, (folder / "stdin").open("rb") as inward, (folder / "stdout").open("wb") as outward:
            fds = [end.fileno() for end in (theirs, peer) if end]
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", str(JAIL), *map(str, fds)],
                stdin=inward,
                stdout=outward,
                stderr=subprocess.DEVNULL,
                cwd=self._work,
                env=ENVIRONMENT,
                pass_fds=fds,
                start_new_session=True,
            )
        self._line.settimeout(START_DEADLINE_S)
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self.say(settings)

    def await_confinement(self) -> None:
        """Waits until the process has confined itself; no program runs in it yet.

        Raises:
            NotRun: it could not.
        """
        answer = {}
        with contextlib.suppress(OSError, ValueError):
            answer = json.loads(self._line.makefile("rb").readline())
        if "ready" not in answer:
            raise NotRun(answer.get("refused", "its process ended before the sandbox was set up"))

    def say(self, message: dict[str, Any]) -> None:
        """Sends a message to the process, which must be waiting for one."""
        self._line.sendall(json.dumps(message).encode() + b"\n")

    def reply(self, meter: _Meter, num_messages: int, max_bytes: int) -> bytes | None:
        """What the process sends until it ends; None if it reaches a limit or sends more than it should."""
        reply = b""
        is_open = True
        self._line.settimeout(TICK_S)
        while is_open or self.process.poll() is None:
            if meter.is_over() or _uses_much_disk(self._work):
                return None
            chunk = b""
            try:
                if is_open:
                    chunk = self._line.recv(1 << 16)
                    is_open = chunk != b""
                else:
                    self.process.wait(TICK_S)
            except (TimeoutError, subprocess.TimeoutExpired):
                continue
            except ConnectionError:
                is_open = False
            reply += chunk
            if len(reply) > max_bytes or reply.count(b"\n") > num_messages:
                return None
            if b"\n" in chunk:
                meter.restart()
        return reply

    def line(self, meter: _Meter, max_bytes: int) -> bytes | None:
        """The next message of the process; None if it ends, reaches a limit, or sends more than it should."""
        message = b""
        self._line.settimeout(TICK_S)
        while not message.endswith(b"\n"):
            if meter.is_over() or _uses_much_disk(self._work) or len(message) > max_bytes:
                return None
            try:
                part = self._line.recv(1 << 16)
            except TimeoutError:
                continue
            if not part:
                return None
            message += part
        return message.splitlines()[0]

    def end(self) -> None:
        """Ends the process if it has not ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._line.close()


class _Meter:
    """Measures running processes against a time limit T, in seconds.

    They may use T of processor time, all threads together. A program that sleeps uses none, so T·`ELAPSED` is
    the limit of the elapsed time, without the time in which a thread was ready to run and waited for a
    processor: that is the load of the machine. A program cannot feign it, because its threads only wait while
    others use the processors. If the kernel does not count it, all elapsed time is the program's.
    """

    def __init__(self, pids: Sequence[int], limit_s: float) -> None:
        self._pids = pids
        self._limit_s = limit_s
        self.restart()

    def restart(self) -> None:
        """Starts to measure again from zero."""
        self._start, self._cpu = time.monotonic(), sum(map(cpu_seconds, self._pids))
        self._waits = WaitMeter(lambda: thread_waits(self._pids))

    def is_over(self) -> bool:
        """Whether the processes have reached a limit.

        Raises:
            NotRun: they have not, but need too long because the machine is busy.
        """
        self._waits.look()
        cpu = sum(map(cpu_seconds, self._pids)) - self._cpu
        elapsed = time.monotonic() - self._start
        if cpu > self._limit_s or elapsed - self._waits.waited > ELAPSED * self._limit_s:
            return True
        if elapsed > STALLED * self._limit_s:
            raise NotRun("the machine was too busy: the program got too little processor time")
        return False


def _uses_much_disk(folder: Path) -> bool:
    files = list(islice(os.scandir(folder), MAX_FILES + 1))
    sizes = (file.stat(follow_symlinks=False).st_blocks * 512 for file in files)
    with contextlib.suppress(OSError):  # the program removed a file meanwhile
        return len(files) > MAX_FILES or sum(sizes) > MAX_DISK_BYTES
    return False


def _messages(reply: bytes) -> list[dict[str, Any]]:
    """The messages of a reply; none if one is not from `jail.py`."""
    try:
        messages = [json.loads(line) for line in reply.splitlines()]
    except (ValueError, RecursionError):
        return []
    return messages if all(isinstance(message, dict) for message in messages) else []
