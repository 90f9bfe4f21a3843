"""The processes in which instances of a user's environment class live, one per episode.

    python -m rlctl.environment.worker FILE CLASS FD

imports the class once and forks a process for every episode: starting one takes milliseconds, its state is
its own, and it can be killed. Each process answers calls on the socket that it was given. A message is a line
of JSON. Imports little, so that a fork is small.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlctl.user_code import load_function

#: Longest message of `_tell`; writes to a pipe of at most this size are not mixed.
_ATOMIC = 4096


def line_of(message: Any) -> bytes:
    """A message as it is sent."""
    return json.dumps(message, default=str).encode() + b"\n"


def answer(instance: Any, asked: Mapping[str, Any], wait: Callable[[Any], Any]) -> dict[str, Any]:
    """The result of one call, as text that is cut at `most` characters, or its error.

    `wait` returns the result of an awaitable. Instead of a method, `asked` may name an attribute, as in
    `.reward`; it is None where there is none.
    """
    try:
        result: Any
        if asked["method"].startswith("."):
            result = getattr(instance, asked["method"][1:], None)
        else:
            result = getattr(instance, asked["method"])(**asked["arguments"])
        if inspect.isawaitable(result):
            result = wait(result)
        found: dict[str, Any] = {"number": float(result) if hasattr(result, "__float__") else None}
        if result is not None:
            text = result if isinstance(result, str) else _as_text(result)
            found["text"] = text if len(text) <= asked["most"] else f"{text[: asked['most']]} … (cut)"
    except BaseException as error:  # SystemExit of the user's code, too
        found = {"error": f"{type(error).__name__}: {error}"[: asked["most"]]}
        if isinstance(error, ValueError | LookupError) and not isinstance(error, OSError):
            found["of_values"] = True  # that it worked on, not of what it connects to
    return found | {"done": bool(getattr(instance, "done", False))}


def _as_text(result: Any) -> str:
    """Content of a message in parts, if they are texts, or JSON."""
    parts: list[Any] = result if isinstance(result, list) else []
    if parts and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "".join(str(part.get("text", "")) for part in parts)
    return json.dumps(result, default=str)


async def _awaited(result: Any) -> Any:
    return await result


def _serve(channel: socket.socket, kind: Any, told: int) -> None:
    """One episode's process: creates an instance, and answers calls until the socket closes."""
    os.setsid()  # what its tools start can be killed with it
    channel.sendall(line_of({"pid": os.getpid()}))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Path(os.devnull).open("r+b") as nothing:  # what tools print goes nowhere
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    instance, loop = None, asyncio.new_event_loop()  # one for all calls: what they open stays usable
    known = set(sys.modules)

    def wait(result: Any) -> Any:
        return loop.run_until_complete(_awaited(result))

    for line in channel.makefile("rb"):
        if instance is None:
            try:
                instance = kind() if inspect.isclass(kind) else kind  # an agent function
            except BaseException as error:
                channel.sendall(line_of({"error": f"{type(error).__name__}: {error}", "done": False}))
                continue
        found = line_of(answer(instance, json.loads(line), wait))
        if len(sys.modules) > len(known):  # before the answer, after which this process may be killed
            _tell(told, set(sys.modules) - known)
            known = set(sys.modules)
        channel.sendall(found)


def _tell(told: int, modules: set[str]) -> None:
    """Sends names of modules to the process that forks; drops them if the pipe is full."""
    for name in modules:
        with contextlib.suppress(BlockingIOError):
            os.write(told, f"{name}\n".encode()[:_ATOMIC])


def _learn(read: int) -> None:
    """Imports what an episode's code imported late, so that the next ones have it: packages that load their
    parts at first use, as clients of servers do, would otherwise load them in every process.

    Only parts of packages that the user's file has imported; other modules may do something at their import.
    """
    with contextlib.suppress(BlockingIOError):
        for name in os.read(read, 1 << 16).decode(errors="replace").split("\n"):
            if name.partition(".")[0] in sys.modules and name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)


def main() -> None:
    """Forks a process for each socket that arrives."""
    file, name, number = sys.argv[1:]
    channel = socket.socket(fileno=int(number))
    try:
        kind = load_function(f"{file}:{name}", key="environment.name")
    except BaseException as error:
        channel.sendall(line_of({"error": f"{type(error).__name__}: {error}"}))
        return
    channel.sendall(line_of({"error": ""}))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave no entry
    read, told = os.pipe()
    for end in (read, told):
        os.set_blocking(end, False)
    gc.freeze()  # a collection in a child would copy all memory
    with contextlib.suppress(ConnectionError, KeyboardInterrupt):
        while True:
            data, fds, _, _ = socket.recv_fds(channel, 1, 1)
            if not data:
                return
            _learn(read)
            if os.fork() == 0:
                channel.close()
                os.close(read)
                with contextlib.suppress(OSError, ValueError):  # the other side ended, maybe in a line
                    _serve(socket.socket(fileno=fds[0]), kind, told)
                os._exit(0)
            os.close(fds[0])


if __name__ == "__main__":
    main()
