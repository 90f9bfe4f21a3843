"""The processes in which instances of a user's environment class live, one after the other.

    python -m rlctl.environment.worker FILE CLASS FD

imports the class once and forks a worker process for every socket that arrives. A worker answers the calls of
one episode at a time, with a new instance for each episode. It ends with all that it started when the other
end of the socket closes (`rlctl.supervision`), and by itself after an episode that left something behind: a
process, a thread, another working directory, changed environment variables, or much memory. A message is a
line of JSON. Imports little, so that a fork is small.
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
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.environment.toolbox import TOOLBOX, ToolSettings, toolbox_class
from rlctl.processes import children_of, end_with_parent
from rlctl.supervision import supervise
from rlctl.user_code import load_function

#: Longest message of `_tell`; writes to a pipe of at most this size are not mixed.
_ATOMIC = 4096
#: Message that ends an episode, and the answer of a worker that takes another one.
END, CLEAN = b'"end"\n', b'"clean"\n'
#: What is sent with the socket of a worker for one episode at a time, and of one for several.
ALONE, SHARED = b"+", b"*"
#: A longer line ends a process.
LARGEST = 16 << 20
#: Seconds in which threads of an episode end after it, and pages by which it may enlarge its process.
_JOIN_S, _MOST_PAGES = 0.1, (256 << 20) // os.sysconf("SC_PAGESIZE")


def line_of(message: Any) -> bytes:
    """A message as it is sent."""
    return json.dumps(message, default=str).encode() + b"\n"


def answer(instance: Any, asked: Mapping[str, Any], wait: Callable[[Any], Any]) -> dict[str, Any]:
    """The result of one call, as text that is cut at `most` characters, or its error.

    `wait` returns the result of an awaitable. Instead of a method, `asked` may name an attribute, as in
    `.reward`; it is None where there is none.
    """
    try:
        result = _begun(instance, asked)
        reply = _told(wait(result) if inspect.isawaitable(result) else result, asked["most"])
    except BaseException as error:  # SystemExit of the user's code, too
        reply = _told_error(error, asked["most"])
    return reply | {"done": bool(getattr(instance, "done", False))}


async def answer_beside(instance: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """As `answer`, in a running event loop."""
    try:
        result = _begun(instance, asked)
        found = _told(await result if inspect.isawaitable(result) else result, asked["most"])
    except (Exception, SystemExit) as error:
        found = _told_error(error, asked["most"])
    return found | {"done": bool(getattr(instance, "done", False))}


def _begun(instance: Any, asked: Mapping[str, Any]) -> Any:
    """What the method returns, which may have to be awaited."""
    if asked["method"].startswith("."):
        return getattr(instance, asked["method"][1:], None)
    return getattr(instance, asked["method"])(**asked["arguments"])


def _told(result: Any, most: int) -> dict[str, Any]:
    found: dict[str, Any] = {"number": float(result) if hasattr(result, "__float__") else None}
    if result is not None:
        text = result if isinstance(result, str) else _as_text(result)
        found["text"] = text if len(text) <= most else f"{text[:most]} … (cut)"
    return found


def _told_error(error: BaseException, most: int) -> dict[str, Any]:
    found: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"[:most]}
    if isinstance(error, ValueError | LookupError) and not isinstance(error, OSError):
        found["of_values"] = True  # that it worked on, not of what it connects to
    return found


def _as_text(result: Any) -> str:
    """Content of a message in parts, if they are texts, or JSON."""
    parts: list[Any] = result if isinstance(result, list) else []
    if parts and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "".join(str(part.get("text", "")) for part in parts)
    return json.dumps(result, default=str)


async def _awaited(result: Any) -> Any:
    return await result


class _Worker:
    """The process in which one episode after the other runs.

    Args:
        kind: the class, or an agent function.
        told: pipe to the process that forks, for names of modules.
    """

    def __init__(self, kind: Any, told: int) -> None:
        self._kind = kind
        self._told = told
        self._modules = set(sys.modules)
        self._loop = asyncio.new_event_loop()  # one for all episodes: clients of a module stay usable
        self._clock = _OwnTime()
        self._supervisor = os.getppid()
        self._before = _surroundings()
        self._pages = 0  # of memory, after the first episode
        self._begin()

    def _begin(self) -> None:
        """Makes all ready for the next episode."""
        self._instance: Any = None
        self._executor = ThreadPoolExecutor(thread_name_prefix="episode")
        self._loop.set_default_executor(self._executor)
        self._threads = set(threading.enumerate())

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a call; its `seconds` are those of the user's code."""
        started = self._clock.now()
        if self._instance is None:
            try:
                self._instance = self._kind() if inspect.isclass(self._kind) else self._kind
            except BaseException as error:
                return {"error": f"{type(error).__name__}: {error}", "done": False}
        found = answer(self._instance, asked, self._wait)
        found["seconds"] = self._clock.now() - started
        if len(sys.modules) > len(self._modules):  # before the answer, after which this process may be killed
            _tell(self._told, set(sys.modules) - self._modules)
            self._modules = set(sys.modules)
        return found

    def _wait(self, result: Any) -> Any:
        return self._loop.run_until_complete(_awaited(result))

    def end_episode(self) -> bool:
        """Ends an episode: whether nothing is left of it, so that another one may begin."""
        self._instance = None
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        if tasks:
            self._wait(asyncio.wait(tasks, timeout=_JOIN_S))
        self._executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + _JOIN_S
        for thread in (left := set(threading.enumerate()) - self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._pages = self._pages or _resident_pages()
        is_clean = not (
            any(thread.is_alive() for thread in left)
            or asyncio.all_tasks(self._loop)
            or _surroundings() != self._before
            or _resident_pages() > self._pages + _MOST_PAGES
            or children_of(os.getpid())
            or children_of(self._supervisor) != [os.getpid()]
        )
        self._begin()
        return is_clean


class _OwnTime:
    """A clock of this thread that stands still while the thread waits for a processor."""

    def __init__(self) -> None:
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def now(self) -> float:
        """Seconds since some time."""
        waited = b""
        if self._file >= 0:
            waited = os.pread(self._file, 100, 0)
        return time.perf_counter() - (int(waited.split()[1]) / 1e9 if waited else 0.0)


def _surroundings() -> tuple[str, dict[str, str]]:
    """What the next episode finds: the working directory, and the variables."""
    try:
        return os.getcwd(), dict(os.environ)  # noqa: PTH109
    except FileNotFoundError:
        return "", dict(os.environ)


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1])


def _serve(channel: socket.socket, kind: Any, told: int, *, is_shared: bool) -> None:
    """A worker's process: answers calls until the socket closes, or an episode leaves something behind."""
    os.setsid()  # signals that its tools send to their group reach no other episode
    channel.sendall(line_of({"pid": os.getppid()}))  # of the supervisor, whose descendants are the episode's
    with Path(os.devnull).open("r+b") as nothing:  # what tools print goes nowhere
        for stream in (0, 1, 2):
            os.dup2(nothing.fileno(), stream)
    if is_shared:
        asyncio.run(_serve_several(channel, kind))
        return
    worker = _Worker(kind, told)
    for line in channel.makefile("rb"):
        if line != END:
            channel.sendall(line_of(worker.answer(json.loads(line))))
        elif worker.end_episode():
            channel.sendall(CLEAN)
        else:
            return


async def _serve_several(channel: socket.socket, kind: Any) -> None:
    """A process that several episodes share, all of whose methods are `async`."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=LARGEST)
    instances: dict[int, Any] = {}
    running: dict[int, set[asyncio.Task[None]]] = {}

    async def call(asked: dict[str, Any]) -> None:
        started = time.perf_counter()
        episode = asked["episode"]
        try:
            if episode not in instances:
                instances[episode] = kind() if inspect.isclass(kind) else kind
            found = await answer_beside(instances[episode], asked)
        except (Exception, SystemExit) as error:
            found = _told_error(error, asked["most"]) | {"done": False}
        found |= {"seconds": time.perf_counter() - started, "call": asked["call"]}
        writer.write(line_of(found))

    while line := await reader.readline():
        asked = json.loads(line)
        if "ends" in asked:
            for task in running.pop(asked["ends"], ()):
                task.cancel()
            instances.pop(asked["ends"], None)
            await asyncio.sleep(0)  # the cancelled tasks end
            writer.write(line_of({"call": asked["call"]}))
            continue
        task = asyncio.create_task(call(asked))
        tasks = running.setdefault(asked["episode"], set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)


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
    """Imports the class, and starts a worker for each socket that arrives, until they end."""
    channel = socket.socket(fileno=int(sys.argv[3]))
    # If a supervisor of a worker is killed, this one ends what it leaves.
    supervise(partial(_start_workers, channel), channel.fileno(), keeps_orphans=False)


def _kind(file: str, name: str) -> Any:
    """The class or agent of a worker; for tools without a class, `name` has their settings."""
    if file == TOOLBOX:
        return toolbox_class(ToolSettings.from_text(name))
    return load_function(f"{file}:{name}", key="environment.name")


def _start_workers(channel: socket.socket) -> None:
    file, name = sys.argv[1:3]
    try:
        kind = _kind(file, name)
    except BaseException as error:
        channel.sendall(line_of({"error": f"{type(error).__name__}: {error}"}))
        return
    channel.sendall(line_of({"error": ""}))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave no entry
    read, told = os.pipe()
    for end in (read, told):
        os.set_blocking(end, False)
    gc.freeze()  # a collection in a child would copy all memory
    me = os.getpid()
    with contextlib.suppress(ConnectionError):
        while True:
            data, fds, _, _ = socket.recv_fds(channel, 1, 1)
            if not data:
                return
            _learn(read)
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                end_with_parent(signal.SIGTERM, me)
                channel.close()
                os.close(read)
                calls = socket.socket(fileno=fds[0])
                supervise(partial(_work, calls, kind, told, is_shared=data == SHARED), calls.fileno())
                os._exit(0)
            os.close(fds[0])


def _work(channel: socket.socket, kind: Any, told: int, *, is_shared: bool) -> None:
    with contextlib.suppress(OSError, ValueError):  # the other side ended, maybe in a line
        _serve(channel, kind, told, is_shared=is_shared)
    os._exit(0)


if __name__ == "__main__":
    main()
