"""Real processes that start as forks.

`import torch, transformers, deepspeed` takes seconds. A fork server imports them once; every job is then a
separate process in a separate session, and can be signalled, killed and inspected like any other process.
"""

from __future__ import annotations

import multiprocessing.process
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import forkserver, popen_forkserver
from pathlib import Path
from unittest import mock

import psutil
import torch

from rlctl.processes import free_port

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 400.0

# Set before the server starts: the server and children of jobs must be able to import `rlctl` and `tests`.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
#: Apart from the server that all others in this process share, whose imports are those of its first user.
_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload(["tests.preload"])


class _Popen(popen_forkserver.Popen):
    def _launch(self, process: multiprocessing.process.BaseProcess) -> None:
        with mock.patch.object(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process):
            super()._launch(process)


class _Process(multiprocessing.process.BaseProcess):
    _start_method = "forkserver"
    _Popen = _Popen


class Job:
    """Runs `function(*arguments)` in a separate process; its return value is the exit code."""

    def __init__(
        self,
        function: Callable[..., int],
        *arguments: object,
        log: Path,
        env: dict[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.log = log
        self._process = _Process(
            target=_child, args=(function, arguments, str(log), env or {}, before, dict(os.environ))
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None: it goes on."""
        return self._process.exitcode

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """Returns the exit code, negative for a signal; after a timeout kills the job and fails the test."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.end()
            raise AssertionError(f"still running after {timeout:g} s:\n{self.output[-4000:]}")
        return self._process.exitcode

    def wait_for(self, condition: Callable[[], object], timeout: float = TIMEOUT_S) -> None:
        """Waits until the condition holds; fails if the job ends before."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self._process.is_alive(), f"ended early ({self.wait()}):\n{self.output[-4000:]}"
            if time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"not within {timeout:g} s:\n{self.output[-4000:]}")
            time.sleep(0.03)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to every process of the job, like Ctrl-C in a terminal."""
        os.killpg(self.pid, number)

    def family(self) -> list[psutil.Process]:
        """Live processes of the job's session, including the job itself."""
        found = []
        for process in psutil.process_iter(["status"]):
            try:
                if os.getsid(process.pid) == self.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, PermissionError, psutil.Error):
                continue
        return found

    def orphans(self, grace_s: float = 30.0) -> list[int]:
        """Processes that outlived the job by more than `grace_s`."""
        deadline = time.monotonic() + grace_s
        while (left := self.family()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [process.pid for process in left]

    def end(self) -> None:
        for process in self.family():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                process.kill()


def wait_for_all(jobs: Iterable[Job], timeout: float = TIMEOUT_S, grace_s: float = 30.0) -> list[int | None]:
    """Exit codes; None: ended here, after the timeout or because it went on after another one failed."""
    jobs = list(jobs)
    deadline = time.monotonic() + timeout
    while None in (codes := [job.exit_code for job in jobs]) and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + grace_s)
        time.sleep(0.03)
    for job in jobs:
        if job.exit_code is None:
            job.end()
    return codes


def has_ended(pid: int) -> bool:
    """Whether there is no such process, or only its exit code is left."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def wait_until_ended(pids: Iterable[int], timeout: float) -> list[int]:
    """Returns those of the processes that live after the timeout."""
    deadline = time.monotonic() + timeout
    while (left := [pid for pid in pids if not has_ended(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def writers_to(directory: Path) -> list[int]:
    """Processes whose output goes to files in a directory, as that of servers does."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended, or is another user's
            if Path(f"/proc/{pid}/fd/1").readlink().parent == directory:
                found.append(pid)
    return found


def _child(
    function: Callable[..., int],
    arguments: tuple[object, ...],
    log: str,
    env: dict[str, str],
    before: Callable[[], None] | None,
    parent_env: dict[str, str],
) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()  # the server's environment is that of its start
    os.environ.update(parent_env | env)
    tempfile.tempdir = None  # it was read from the server's environment
    try:
        if before:
            before()
        code = function(*arguments)
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def on_ranks(count: int, function: Callable[..., object], *arguments: object, where: Path) -> list[object]:
    """Calls `function(ranks, *arguments)` on each of `count` ranks; returns the result of each rank."""
    port = str(free_port())
    jobs = []
    for rank in range(count):
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        result, log = where / f"result-{count}-{rank}.pt", where / f"log-{count}-{rank}.txt"
        jobs.append(Job(_on_rank, function, arguments, str(result), log=log, env=env))
    codes = [job.wait() for job in jobs]
    assert not any(codes), "\n".join(job.output[-4000:] for job in jobs)
    return [torch.load(where / f"result-{count}-{rank}.pt", weights_only=False) for rank in range(count)]


def on_ranks_each(
    count: int, function: Callable[..., object], cases: Iterable[tuple[object, ...]], *, where: Path
) -> dict[tuple[object, ...], list[object]]:
    """Calls `function(ranks, *case)` for one case after the other, all in the same processes.

    Returns:
        Case → the results of the ranks.
    """
    cases = list(cases)
    by_rank = on_ranks(count, _each, function, cases, where=where)
    return {case: [found[case] for found in by_rank] for case in cases}  # type: ignore[index]


def _each(
    ranks: object, function: Callable[..., object], cases: list[tuple[object, ...]]
) -> dict[tuple[object, ...], object]:
    found = {}
    for case in cases:
        try:
            found[case] = function(ranks, *case)
        except BaseException as error:
            error.add_note(f"in the case {case}")
            raise
    return found


def _on_rank(function: Callable[..., object], arguments: tuple[object, ...], result: str) -> int:
    from rlctl.engine.ranks import join_ranks, leave_ranks

    torch.set_num_threads(1)
    value = function(join_ranks(), *arguments)
    torch.save(value, result)
    leave_ranks()
    return 0
