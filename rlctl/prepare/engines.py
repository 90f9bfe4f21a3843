"""Runs tasks in this process, or in worker processes. Results keep the order of the tasks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from queue import SimpleQueue
from typing import Any, TypeVar

from rlctl.errors import RunFailure
from rlctl.processes import restore_import_path, safe_import_path

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")

#: Tasks submitted per worker ahead of the oldest pending result.
AHEAD = 2
#: Seconds in which a worker that has answered ends by itself.
_END_S = 10.0


def run(
    function: Callable[[Shared, Task], Result],
    shared: Shared,
    tasks: Iterable[Task],
    workers: int,
) -> Iterator[tuple[Task, Result]]:
    """Yields each task with `function(shared, task)`, in order.

    Workers import `function` by name, and receive `shared` once. `tasks` are consumed lazily, only a few
    ahead of the results. With 0 or 1 workers the tasks run in this process.

    Raises:
        RunFailure: a worker died.
    """
    if workers <= 1:
        return ((task, function(shared, task)) for task in tasks)
    return _in_processes(function, shared, tasks, workers)


def _in_processes(
    function: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task], workers: int
) -> Iterator[tuple[Task, Result]]:
    # A fork server starts the workers: they share its imported libraries but no state of this process, whose
    # threads would make forking unsafe.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlctl.prepare.transform", "pyarrow.parquet"])
    started: list[_Worker] = []
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def result_of(task: Task) -> Any:
        worker = idle.get()
        try:
            return worker.result_of(task)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(workers, "prepare-data")
    waiting: deque[tuple[Task, Future[Any]]] = deque()
    left = iter(tasks)
    try:
        while True:
            for task in islice(left, AHEAD * workers - len(waiting)):
                if len(started) < workers:
                    started.append(_Worker(context, function, shared))
                    idle.put(started[-1])
                waiting.append((task, threads.submit(result_of, task)))
            if not waiting:
                return
            task, future = waiting.popleft()
            yield task, future.result()
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
        for worker in started:
            worker.end()


class _Worker:
    """A process that answers tasks over a pipe of its own.

    The workers of `ProcessPoolExecutor` share one pipe: if one is killed while it writes a result, the others
    wait for ever. Here the end of a process is the end of its pipe.
    """

    def __init__(self, context: ForkServerContext, function: Callable[[Any, Any], Any], shared: Any) -> None:
        self._pipe, theirs = context.Pipe()
        with safe_import_path():
            self._process = context.Process(target=_answer, args=(theirs, function, shared))
            self._process.start()
        theirs.close()

    def result_of(self, task: Any) -> Any:
        """The result of the task.

        Raises:
            RunFailure: the process died.
            Exception: what the function raised.
        """
        try:
            self._pipe.send(task)
            result, error = self._pipe.recv()
        except (EOFError, OSError) as broken:
            raise RunFailure(
                "a worker process died: it was killed, or memory ran out",
                fix="lower --workers, or give it more memory",
            ) from broken
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Ends the process, which must have answered."""
        self._pipe.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _answer(tasks: Connection, function: Callable[[Any, Any], Any], shared: Any) -> None:
    """Answers tasks until the pipe is closed, each with its result or the exception."""
    restore_import_path()
    # Tasks create many objects and no garbage: frequent collection would take a fifth of the time.
    gc.set_threshold(1_000_000)
    # The parent handles Ctrl-C and ends the workers; those killed by the signal would count as failures.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):  # the parent has closed the pipe
        while True:
            task = tasks.recv()
            result: Any = None
            error: Exception | None = None
            try:
                result = function(shared, task)
            except Exception as raised:
                raised.add_note(f"in a worker process:\n{traceback.format_exc()}")
                error = raised
            tasks.send((result, error))


def _end_with_parent() -> None:
    """Exits when the parent ends: a killed parent cannot stop its workers, which would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
