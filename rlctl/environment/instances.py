"""Instances of a user's environment class, each alone in a worker process that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from rlctl.environment.protocol import EnvironmentFault
from rlctl.environment.worker import ALONE, CLEAN, END, LARGEST, SHARED, answer, line_of
from rlctl.errors import UsageError
from rlctl.processes import import_path
from rlctl.processor_time import LOOKS, MachineBusy, TreeMeter, seconds_left

#: Variables of the environment that every process gets.
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
#: Seconds in which all processes of an environment end.
_END_S = 10.0
#: Seconds in which a shared process cancels a call.
_CANCEL_S = 2.0
#: Seconds in which a worker answers that it takes another episode.
_CLEAN_S = 5.0

_log = logging.getLogger(__name__)


class SharedProcessEnded(Exception):
    """In a process that several episodes share one of them may have caused it: it is played again, alone."""


class TimedOut(Exception):
    """A call took longer than its limit; its process was ended."""


class Instances:
    """Starts workers, and gives each one episode at a time.

    A worker takes another episode unless the one before failed, was cut off by a time-out, or left something
    behind; then a new one is started.

    Args:
        variables: names of further environment variables that the processes get, such as keys of services.
        is_fresh: every episode gets a new process.
        num_sharing: episodes that share a process, if all methods are `async`; 1: each is alone.

    Raises:
        UsageError: the class cannot be imported.
    """

    def __init__(
        self,
        file: str,
        name: str,
        variables: Sequence[str] = (),
        *,
        is_fresh: bool = False,
        num_sharing: int = 1,
    ) -> None:
        ours, theirs = socket.socketpair()
        kept = {key: os.environ[key] for key in (*_KEPT, *variables) if key in os.environ}
        kept["PYTHONPATH"] = import_path()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlctl.environment.worker", file, name, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only the trainer, which finishes its step
            )
        self._channel = ours
        self._is_fresh = is_fresh
        self._num_sharing = num_sharing
        self._shared: _SharedProcess | None = None  # with seats left
        self._idle: list[_Worker] = []
        self._file = Path(file)
        self._version = _version_of(self._file)
        try:
            problem = json.loads(ours.makefile("rb").readline())["error"]
        except (ValueError, ConnectionError):
            problem = "its process ended"
        if problem:
            self.close()
            raise UsageError(f"the environment cannot be imported: {problem}", where=f"{file}:{name}")

    @contextlib.asynccontextmanager
    async def instance(self, *, is_alone: bool = False) -> AsyncIterator[Instance | SharedInstance]:
        """A new instance until the block ends, alone in its worker unless episodes share one.

        Raises:
            EnvironmentFault: no process could be started.
        """
        if self._num_sharing > 1 and not is_alone:
            async with self._seat() as shared:
                yield shared
            return
        worker = await self._waiting_worker() or await self._new_worker()
        instance = Instance(worker)
        is_whole = False
        try:
            yield instance
            is_whole = instance.is_alive and not instance.is_busy and not self._is_fresh
        finally:
            if not (is_whole and worker.end_episode()):
                worker.end()
            else:
                worker.leave_loop()
                self._idle.append(worker)

    @contextlib.asynccontextmanager
    async def _seat(self) -> AsyncIterator[SharedInstance]:
        """An instance in a process with a free seat, which ends with its last episode."""
        loop = asyncio.get_running_loop()
        process = self._shared
        if process is None or process.loop is not loop or not process.take_seat():
            process = self._shared = _SharedProcess(loop, self._num_sharing)
            process.take_seat()
            process.starting = loop.create_task(self._new_worker(SHARED))
        try:
            await process.started()
            yield SharedInstance(process, process.next_number())
        finally:
            process.leave_seat()

    async def _waiting_worker(self) -> _Worker | None:
        """A worker that has ended an episode and takes another one; None: there is none."""
        self._check_file()
        while self._idle:
            worker = self._idle.pop()
            if await worker.is_ready():
                return worker
            worker.end()
        return None

    def _check_file(self) -> None:
        """Ends workers that wait if the file has changed; new ones have the code with which the run began."""
        version = _version_of(self._file)
        if version == self._version:
            return
        self._version = version
        _log.warning("%s changed: this run goes on with the code that it began with", self._file)
        while self._idle:
            self._idle.pop().end()

    async def _new_worker(self, kind: bytes = ALONE) -> _Worker:
        ours, theirs = socket.socketpair()
        worker = _Worker(ours)
        try:
            with theirs:
                await worker.enter_loop()
                socket.send_fds(self._channel, [kind], [theirs.fileno()])
            worker.pid = json.loads(await worker.line())["pid"]
        except BaseException as error:  # a process that has started meanwhile ends itself
            worker.end()
            if not isinstance(error, OSError | ValueError):
                raise
            raise EnvironmentFault("the process that starts environments has ended") from error
        return worker

    def close(self) -> None:
        """Ends all processes, and what they started."""
        while self._idle:
            self._idle.pop().end()
        self._channel.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it was stopped
            self._process.kill()
            self._process.wait()


def _version_of(file: Path) -> tuple[int, int] | None:
    """Changes with the file; None: there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class _Worker:
    """A worker's end of the socket; each event loop in which it is used reads a copy of the descriptor.

    Attributes:
        pid: of its supervisor, whose descendants are those of the episode.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self.pid = 0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def enter_loop(self) -> None:
        """Reads and writes in the running event loop."""
        copy = self._channel.dup()
        self._reader, self._writer = await asyncio.open_connection(sock=copy, limit=LARGEST)

    def leave_loop(self) -> None:
        """Stops reading and writing in the event loop; the process waits for another one."""
        if self._writer:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def line(self) -> bytes:
        """The next line; empty: the process has ended."""
        if self._reader is None:
            raise AssertionError("the worker is in no event loop")
        return await self._reader.readline()

    async def send(self, line: bytes) -> None:
        """Sends a line."""
        if self._writer is None:
            raise AssertionError("the worker is in no event loop")
        self._writer.write(line)
        await self._writer.drain()

    def end_episode(self) -> bool:
        """Asks the process to end its episode; false: it has ended itself."""
        try:
            return self._channel.send(END) == len(END)
        except OSError:  # also one that reads nothing
            return False

    async def is_ready(self) -> bool:
        """Whether it has ended its last episode, and takes another one."""
        try:
            await self.enter_loop()
            is_clean = await asyncio.wait_for(self.line(), _CLEAN_S) == CLEAN
            return is_clean and not self._has_ended()
        except (OSError, ValueError):  # TimeoutError is an OSError
            return False

    def _has_ended(self) -> bool:
        """Whether the other end of the socket is closed, which may come behind lines that are not read."""
        poll = select.poll()
        poll.register(self._channel, 0)
        return bool(poll.poll(0))

    def end(self) -> None:
        """Ends the process, and what it started."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self.leave_loop()
        self._channel.close()


class Instance:
    """One instance.

    Attributes:
        pid: the process whose descendants are those of the episode.
        is_alive: no call has ended its process.
        is_busy: a call has not returned.
        own_s: seconds in which the user's code ran.
    """

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self.pid = worker.pid
        self._meter = TreeMeter()
        self._meter.watch(worker.pid)
        self.is_alive = True
        self.is_busy = False
        self.own_s = 0.0

    async def call(
        self, method: str, arguments: Mapping[str, Any], *, timeout_s: float | None, most: int
    ) -> dict[str, Any]:
        """Calls a method: `text` of its result, `number` if it is one, or `error`; and whether it is `done`.

        Raises:
            TimedOut: the call took longer, not counting time in which it waited for a processor; the
                instance is gone.
            MachineBusy: it waited for far longer; the instance is gone.
            EnvironmentFault: its process has ended.
        """
        self.is_busy = True
        started = time.monotonic()
        try:
            found = await _in_time(self._asked(method, arguments, most), timeout_s, self._meter)
            self.is_busy = False
            self.own_s += float(found.pop("seconds", 0.0))
            return found
        except MachineBusy:
            self.end()
            raise
        except TimeoutError:
            self.end()
            self.own_s += time.monotonic() - started
            raise TimedOut from None
        except (OSError, ValueError) as error:
            self.end()
            raise EnvironmentFault(f"the process of the environment ended in {method}") from error

    async def _asked(self, method: str, arguments: Mapping[str, Any], most: int) -> dict[str, Any]:
        await self._worker.send(line_of({"method": method, "arguments": dict(arguments), "most": most}))
        found: dict[str, Any] = json.loads(await self._worker.line())
        return found

    def end(self) -> None:
        """Ends the process, and what it started."""
        self.is_alive = False
        self._worker.end()


async def _in_time(
    asked: Coroutine[Any, Any, dict[str, Any]], timeout_s: float | None, meter: TreeMeter
) -> dict[str, Any]:
    """The answer, if it comes in time; otherwise raises `TimeoutError` or `MachineBusy`."""
    if timeout_s is None:
        return await asked
    answer = asyncio.ensure_future(asked)
    started = time.monotonic()
    waited = None
    left = timeout_s
    try:
        while left > 0:
            await asyncio.wait({answer}, timeout=max(min(left, timeout_s / LOOKS), 0.01))
            if answer.done():
                return answer.result()
            meter.look()
            waited = meter.waited if waited is None else waited  # short calls are not measured
            left = seconds_left(timeout_s, time.monotonic() - started, meter.waited - waited)
    finally:
        answer.cancel()
    raise TimeoutError


class _SharedProcess:
    """A process with a number of seats, one for each episode of its life.

    Attributes:
        loop: the event loop in which it is used.
        starting: starts it.
    """

    starting: asyncio.Task[_Worker]

    def __init__(self, loop: asyncio.AbstractEventLoop, num_seats: int) -> None:
        self.loop = loop
        self._left = num_seats
        self._sitting = 0
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._worker: _Worker | None = None
        self._reading: asyncio.Task[None] | None = None
        self.has_ended = False

    @property
    def pid(self) -> int:
        """Of its supervisor."""
        return self._worker.pid if self._worker else 0

    def take_seat(self) -> bool:
        """Whether there was a seat."""
        if not self._left or self.has_ended:
            return False
        self._left -= 1
        self._sitting += 1
        return True

    def leave_seat(self) -> None:
        """The process ends with its last episode."""
        self._sitting -= 1
        if not self._sitting:
            self._left = 0
            self.end()

    async def started(self) -> None:
        """Waits until it has started; raises as `Instances.instance`."""
        self._worker = await asyncio.shield(self.starting)
        if self._reading is None:
            self._reading = self.loop.create_task(self._read())

    def next_number(self) -> int:
        """A number for an episode or a call."""
        return next(self._numbers)

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a message.

        Raises:
            SharedProcessEnded: the process has ended.
        """
        if self.has_ended or self._worker is None:
            raise SharedProcessEnded
        number = self.next_number()
        answer = self._calls[number] = self.loop.create_future()
        try:
            await self._worker.send(line_of(message | {"call": number}))
            found: dict[str, Any] = await answer
        except OSError as error:
            raise SharedProcessEnded from error
        finally:
            self._calls.pop(number, None)
        return found

    async def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while self._worker and (line := await self._worker.line()):
                found = json.loads(line)
                answer = self._calls.get(found.pop("call"))
                if answer and not answer.done():
                    answer.set_result(found)
        self.end()

    def end(self) -> None:
        """Ends the process, and what it started; all calls that wait raise `SharedProcessEnded`."""
        self.has_ended = True
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(SharedProcessEnded())
        if self._worker:
            self._worker.end()
        elif self.starting.done() and not self.starting.cancelled() and not self.starting.exception():
            self.starting.result().end()
        self.starting.cancel()
        if self._reading and self._reading is not asyncio.current_task(self.loop):
            self._reading.cancel()


class SharedInstance:
    """One instance in a process that several episodes share; see `Instance`."""

    def __init__(self, process: _SharedProcess, episode: int) -> None:
        self._process = process
        self._episode = episode
        self.pid = process.pid
        self._meter = TreeMeter()
        self._meter.watch(process.pid)
        self.is_alive = True
        self.own_s = 0.0

    async def call(
        self, method: str, arguments: Mapping[str, Any], *, timeout_s: float | None, most: int
    ) -> dict[str, Any]:
        """See `Instance.call`.

        Raises:
            SharedProcessEnded: the process has ended, or the call was late, maybe because of another episode.
        """
        asked = {"episode": self._episode, "method": method, "arguments": dict(arguments), "most": most}
        try:
            found = await _in_time(self._process.ask(asked), timeout_s, self._meter)
            self.own_s += float(found.pop("seconds", 0.0))
            return found
        except TimeoutError:
            await self._stop()
            raise SharedProcessEnded from None
        except (MachineBusy, asyncio.CancelledError):
            self.is_alive = False
            raise

    async def _stop(self) -> None:
        """Ends the episode in the process; the process, if it does not react."""
        self.is_alive = False
        try:
            await asyncio.wait_for(self._process.ask({"ends": self._episode}), _CANCEL_S)
        except (TimeoutError, SharedProcessEnded):
            self._process.end()


class LocalInstances:
    """Instances of a class that rlctl ships: in this process, which is much faster."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def instance(self, *, is_alone: bool = False) -> contextlib.nullcontext[LocalInstance]:
        """A new instance."""
        del is_alone
        return contextlib.nullcontext(LocalInstance(self._kind()))

    def close(self) -> None:
        """Nothing was started."""


class LocalInstance:
    """One instance of such a class; its methods are not async."""

    is_alive, pid = True, 0

    def __init__(self, instance: Any) -> None:
        self._instance = instance
        self.own_s = 0.0

    async def call(
        self, method: str, arguments: Mapping[str, Any], *, timeout_s: float | None, most: int
    ) -> dict[str, Any]:
        """See `Instance.call`; no call hangs."""
        del timeout_s
        asked = {"method": method, "arguments": arguments, "most": most}
        started = time.perf_counter()
        found = answer(self._instance, asked, asyncio.run)
        self.own_s += time.perf_counter() - started
        return found
