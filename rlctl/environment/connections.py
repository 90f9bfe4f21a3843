"""Accepts connections at a port of this machine, which any of its users can reach.

A connection that has not shown a key takes up a descriptor of the trainer. All listeners of a process
together hold at most `MOST_UNKNOWN` of them, each for a few seconds; a further one replaces the oldest, once
that had time to send its headers. Connections of other users have few places of their own, and take none of
this user's: one that comes while all of these are taken is closed at once, so that no flood of them holds up
the queue of the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rlctl.environment.peer_users import PeerUsers

_log = logging.getLogger(__name__)
#: Most connections of a process that have not shown a key: of its user, and of others.
MOST_UNKNOWN, MOST_OF_OTHERS = 128, 32
#: Seconds in which a connection must show its key, and in which no other one replaces it; afterwards its
#: event loop passes that many times before one does: a loop that was held up has not read what has arrived.
HEADERS_S, _UNDISTURBED_S, _UNDISTURBED_PASSES = 5.0, 0.25, 20
#: Connections of others that are closed before the event loop does anything else.
_CLOSED_AT_ONCE = 32
#: Seconds until a listener that has no place looks for one again, until one that got no descriptor tries
#: again, and between two lines about lost connections.
_LOOK_AGAIN_S, _RETRY_S, _BETWEEN_LINES_S = 0.02, 0.1, 60.0


class Unknown:
    """A connection that has not shown a key."""

    def __init__(self, transport: asyncio.WriteTransport, *, is_own: bool) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self.is_own = is_own
        self.may_be_replaced = False
        self._loop.call_later(_UNDISTURBED_S if is_own else 0.0, self._pass, _UNDISTURBED_PASSES)

    def _pass(self, left: int) -> None:
        if left:
            self._loop.call_soon(self._pass, left - 1)
        else:
            self.may_be_replaced = True

    def drop(self) -> None:
        """Closes it, from any thread."""
        with contextlib.suppress(RuntimeError):  # its loop has ended, and has closed it
            self._loop.call_soon_threadsafe(self._transport.abort)


class _Unknowns:
    """Those of this process: several event loops may run in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Unknown, None] = {}  # of this user, oldest first
        self._of_others: dict[Unknown, None] = {}
        self._others_begun = 0  # connections of others that are accepted and not yet among these
        self._num_lost = 0
        self._said_at = -_BETWEEN_LINES_S

    def add(self, connection: Unknown) -> None:
        with self._lock:
            if connection.is_own:
                self._waiting[connection] = None
            else:
                self._of_others[connection] = None
                self._others_begun -= 1

    def remove(self, connection: Unknown) -> None:
        with self._lock:
            self._waiting.pop(connection, None)
            self._of_others.pop(connection, None)

    def admits_another_user(self) -> bool:
        """Whether there is a place for a connection of another user, which `add` then takes."""
        oldest = None
        with self._lock:
            if len(self._of_others) + self._others_begun >= MOST_OF_OTHERS:
                oldest = next(iter(self._of_others), None)
                if oldest is None or not oldest.may_be_replaced:
                    return False
                del self._of_others[oldest]
            self._others_begun += 1
        if oldest is not None:
            oldest.drop()
            self.lost("showed no key while others waited")
        return True

    def gives_up_place(self) -> None:
        """A connection that `admits_another_user` let in has ended before `add`."""
        with self._lock:
            self._others_begun -= 1

    def seconds_until_free(self) -> float:
        """Seconds until a further connection may be accepted; if it is 0, there is a place for it."""
        with self._lock:
            if len(self._waiting) < MOST_UNKNOWN:
                return 0.0
            oldest = next(iter(self._waiting))
            if not oldest.may_be_replaced:
                return _LOOK_AGAIN_S
            del self._waiting[oldest]
        oldest.drop()
        self.lost("showed no key while others waited")
        return 0.0

    def lost(self, why: str) -> None:
        """Counts a connection that was closed or not accepted; a line a minute says so."""
        with self._lock:
            self._num_lost += 1
            if time.monotonic() - self._said_at < _BETWEEN_LINES_S:
                return
            self._said_at, count, self._num_lost = time.monotonic(), self._num_lost, 0
        _log.warning("connections to the agents' endpoint that were closed: %d; the last %s", count, why)


_unknowns = _Unknowns()


class Listener:
    """Accepts connections on a free port of the loopback interface, and handles each in a task.

    Args:
        handle: called with reader, writer, and a function to call once the connection has shown its key. The
            connection is closed after it.
    """

    def __init__(
        self,
        handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter, Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._handle = handle
        self._tasks: set[asyncio.Task[Any]] = set()
        # From a full queue the kernel resets any connection; those that wait in it take no descriptor.
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._users = PeerUsers()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Closes the port and all connections."""
        self._accepting.cancel()
        tasks = [self._accepting, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
        self._users.close()

    async def _accept(self) -> None:
        loop, num_closed = asyncio.get_running_loop(), 0
        while True:
            while (wait_s := _unknowns.seconds_until_free()) > 0:
                await asyncio.sleep(wait_s)
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # no descriptor is left, or the client has gone
                _unknowns.lost(f"could not be accepted ({error.strerror})")
                await asyncio.sleep(_RETRY_S)
                continue
            is_own = self._users.user_of(connection) in {None, os.getuid()}
            if not is_own and not _unknowns.admits_another_user():
                connection.close()
                _unknowns.lost("was another user's, as many others were")
                num_closed += 1
                if num_closed % _CLOSED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                continue
            task = asyncio.create_task(self._handled(connection, is_own=is_own))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            await asyncio.sleep(0)  # what is there is read before further ones are accepted

    async def _handled(self, connection: socket.socket, *, is_own: bool) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
        except BaseException:
            connection.close()
            if not is_own:
                _unknowns.gives_up_place()
            raise
        unknown = Unknown(writer.transport, is_own=is_own)
        _unknowns.add(unknown)
        try:
            await self._handle(reader, writer, lambda: _unknowns.remove(unknown))
        finally:
            _unknowns.remove(unknown)
            writer.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it has ended the episode, see `RecordedChat.failed`
