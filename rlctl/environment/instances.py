"""Instances of a user's environment class, each in a process of its own that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rlctl.environment.protocol import EnvironmentFault
from rlctl.environment.worker import answer, line_of
from rlctl.errors import UsageError

#: Variables of the environment that every process gets.
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
#: A longer answer of a process ends it.
_LARGEST = 16 << 20


class TimedOut(Exception):
    """A call took longer than its limit; its process was killed."""


class Instances:
    """Starts a process for every instance of a class.

    Args:
        variables: names of further environment variables that the processes get, such as keys of services.

    Raises:
        UsageError: the class cannot be imported.
    """

    def __init__(self, file: str, name: str, variables: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        kept = {key: os.environ[key] for key in (*_KEPT, *variables) if key in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlctl.environment.worker", file, name, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._channel = ours
        self._children: set[int] = set()
        try:
            problem = json.loads(ours.makefile("rb").readline())["error"]
        except (ValueError, ConnectionError):
            problem = "its process ended"
        if problem:
            self.close()
            raise UsageError(f"the environment cannot be imported: {problem}", where=f"{file}:{name}")

    @contextlib.asynccontextmanager
    async def instance(self) -> AsyncIterator[Instance]:
        """A new instance, which ends with the block.

        Raises:
            EnvironmentFault: no process could be started.
        """
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as ends:
            try:
                with theirs:
                    reader, writer = await asyncio.open_connection(sock=ours, limit=_LARGEST)
                    ends.callback(writer.transport.abort)  # a process that has started meanwhile ends itself
                    socket.send_fds(self._channel, [b"+"], [theirs.fileno()])
                pid = json.loads(await reader.readline())["pid"]
            except (OSError, ValueError) as error:
                raise EnvironmentFault("the process that starts environments has ended") from error
            self._children.add(pid)
            ends.callback(self._children.discard, pid)
            found = Instance(reader, writer, pid)
            ends.callback(found.kill)
            yield found

    def close(self) -> None:
        """Kills all processes."""
        for pid in tuple(self._children):  # other threads may end some
            _kill(pid)
        self._channel.close()
        self._process.kill()
        self._process.wait()


class Instance:
    """One instance."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self._reader, self._writer, self._pid = reader, writer, pid
        self.is_alive = True

    async def call(
        self, method: str, arguments: Mapping[str, Any], *, timeout_s: float | None, most: int
    ) -> dict[str, Any]:
        """Calls a method: `text` of its result, `number` if it is one, or `error`; and whether it is `done`.

        Raises:
            TimedOut: the call took longer; the instance is gone.
            EnvironmentFault: its process has ended.
        """
        try:
            return await asyncio.wait_for(self._asked(method, arguments, most), timeout_s)
        except TimeoutError:
            self.kill()
            raise TimedOut from None
        except (OSError, ValueError) as error:
            self.kill()
            raise EnvironmentFault(f"the process of the environment ended in {method}") from error

    async def _asked(self, method: str, arguments: Mapping[str, Any], most: int) -> dict[str, Any]:
        self._writer.write(line_of({"method": method, "arguments": dict(arguments), "most": most}))
        await self._writer.drain()
        found: dict[str, Any] = json.loads(await self._reader.readline())
        return found

    def kill(self) -> None:
        """Ends the process, and what it started."""
        if self.is_alive:
            self.is_alive = False
            _kill(self._pid)


class LocalInstances:
    """Instances of a class that rlctl ships: in this process, which is much faster."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def instance(self) -> contextlib.nullcontext[LocalInstance]:
        """A new instance."""
        return contextlib.nullcontext(LocalInstance(self._kind()))

    def close(self) -> None:
        """Nothing was started."""


class LocalInstance:
    """One instance of such a class; its methods are not async."""

    is_alive = True

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    async def call(
        self, method: str, arguments: Mapping[str, Any], *, timeout_s: float | None, most: int
    ) -> dict[str, Any]:
        """See `Instance.call`; no call hangs."""
        del timeout_s
        asked = {"method": method, "arguments": arguments, "most": most}
        return answer(self._instance, asked, asyncio.run)


def _kill(pid: int) -> None:
    for end in (os.killpg, os.kill):  # its own group, once it has formed it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)
