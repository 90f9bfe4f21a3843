"""Grading processes as forks of a process that has imported what they need.

Without it a pool would wait for the imports of each of its processes, and again of the one that replaces a
process that a response ended: sympy takes more than a second.

    this process  ──control──  server  ──fork──  supervisor  ──fork──  grading process
         └──────────────── requests, replies ────────┴──────────────────────┘

`rlctl.reward.worker` is what the server runs. It has one thread and imports code of rlctl only, each built-in
grader in a server of its own. It ends when this process closes the control socket, or ends in any way; the
supervisors do so when their requests are closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from io import FileIO
from typing import Any

from rlctl.processes import environment_without_keys

#: Seconds for the imports of a server, and in which a supervisor ends what it has started.
START_DEADLINE_S, _END_S = 60.0, 10.0
#: Beginnings of environment variables that only the start of a process reads: others are those of each fork.
_READ_AT_START = ("PYTHON", "LD_")
_LENGTH_BYTES = 8
_MAX_DESCRIPTORS = 3


class ServerEnded(Exception):
    """The server ended, or did not reply in time (`is_slow`)."""

    def __init__(self, *, is_slow: bool = False) -> None:
        super().__init__(is_slow)
        self.is_slow = is_slow


class ForkedProcess:
    """The supervisor of a grading process, and the pipes to the latter."""

    def __init__(self, pid: int, requests: int, replies: int, server: _Server) -> None:
        self.pid = pid
        self.requests = FileIO(requests, "w")
        self.replies = FileIO(replies)
        self._server = server
        self._owner = os.getpid()

    def close(self) -> None:
        """Ends the grading process and all processes that it started; not in a fork of this process."""
        self.requests.close()  # the supervisor then ends the others
        if os.getpid() != self._owner:
            self.replies.close()
            return
        poll = select.poll()
        poll.register(self.replies, select.POLLIN)
        deadline = time.monotonic() + _END_S
        has_ended = False
        while not has_ended and (left_s := deadline - time.monotonic()) > 0.0 and poll.poll(1000 * left_s):
            has_ended = not self.replies.read(1 << 16)
        self.replies.close()
        self._server.end(self.pid, has_ended=has_ended)


def start(grader: str, params: dict[str, Any], *, is_ours: bool) -> ForkedProcess:
    """Starts a grading process, with this process's environment and working directory.

    Raises:
        ServerEnded: its server could not import the grader.
    """
    environment = environment_without_keys()
    paths = environment["PYTHONPATH"].split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))
    for is_again in (False, True):
        server = _server_for(grader if is_ours else "", environment)
        try:
            return server.fork({"grader": grader, "params": params, "environment": environment})
        except ServerEnded as error:
            _discard(server)
            if is_again or error.is_slow:
                raise
    raise AssertionError("the second try returns or raises")


class _Server:
    """A server for forks of one built-in grader, or ("") of users' functions."""

    def __init__(self, grader: str, environment: dict[str, str]) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_DEADLINE_S)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlctl.reward.worker", grader],
                cwd="/",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self._pid = process.pid
        process.returncode = 0  # `close` waits for it

    def fork(self, request: dict[str, Any]) -> ForkedProcess:
        """Starts a process; raises `ServerEnded`."""
        theirs = [-1, -1, -1]
        theirs[0], requests = os.pipe()
        replies, theirs[1] = os.pipe()
        try:
            theirs[2] = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
            pid = int(self._ask(request, theirs)["pid"])
        except BaseException:
            os.close(requests)
            os.close(replies)
            raise
        finally:
            for descriptor in theirs:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        return ForkedProcess(pid, requests, replies, self)

    def end(self, pid: int, *, has_ended: bool) -> None:
        """Ends what is left of a fork's process group if its supervisor was killed or stopped."""
        try:
            self._ask({"end": pid})
        except ServerEnded:
            if not has_ended:  # else the number may belong to another process by now
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            try:
                send(self._control, request, descriptors)
                reply, _ = receive(self._control)
            except OSError as error:
                raise ServerEnded(is_slow=isinstance(error, TimeoutError)) from error
        if reply is None:
            raise ServerEnded
        return reply

    def forget(self) -> None:
        """In a fork of this process: the server ends although the fork goes on."""
        self._control.close()
        self._lock = threading.Lock()  # another thread may have held it

    def close(self) -> None:
        """Ends the server; its forks go on."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


_servers: dict[tuple[str, ...], _Server] = {}
_lock = threading.Lock()


def _server_for(grader: str, environment: dict[str, str]) -> _Server:
    """The server of the grader; servers with other settings of Python are ended."""
    settings = [f"{name}={value}" for name, value in environment.items() if name.startswith(_READ_AT_START)]
    key = (grader, *sorted(settings))
    with _lock:
        for outdated in [known for known in _servers if known[1:] != key[1:]]:
            _servers.pop(outdated).close()
        if key not in _servers:
            _servers[key] = _Server(grader, environment)
        return _servers[key]


def _discard(server: _Server) -> None:
    with _lock:
        for key in [key for key, known in _servers.items() if known is server]:
            _servers.pop(key).close()


def _forget_servers() -> None:
    """In a fork of this process."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    for server in _servers.values():
        server.forget()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_servers)


def send(control: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends a message with descriptors; raises OSError if nobody receives it."""
    text = json.dumps(message).encode()
    socket.send_fds(control, [len(text).to_bytes(_LENGTH_BYTES, "big")], descriptors)
    control.sendall(text)


def receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors, which no program inherits; None: the other end is closed."""
    head, descriptors, _, _ = socket.recv_fds(
        control, _LENGTH_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    if not head:
        return None, []
    text = bytearray()
    while len(text) < int.from_bytes(head, "big"):
        part = control.recv(1 << 16)
        if not part:
            return None, descriptors
        text += part
    return json.loads(text), descriptors
