"""Runs tasks in this process, or in worker processes. Results keep the order of the tasks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from rlctl.errors import RunFailure

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")

#: Tasks submitted per worker ahead of the oldest pending result.
AHEAD = 2


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
    pool = ProcessPoolExecutor(workers, context, _start_worker, (function, shared))
    waiting: deque[tuple[Task, Future[Any]]] = deque()
    left = iter(tasks)
    try:
        while True:
            for task in islice(left, AHEAD * workers - len(waiting)):
                waiting.append((task, pool.submit(_work, task)))
            if not waiting:
                return
            task, future = waiting.popleft()
            yield task, future.result()
    except BrokenProcessPool as error:
        raise RunFailure(
            "a worker process died: it was killed, or memory ran out",
            fix="lower --workers, or give it more memory",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_function: Callable[[Any, Any], Any]
_shared: Any


def _start_worker(function: Callable[[Any, Any], Any], shared: Any) -> None:
    global _function, _shared
    _function, _shared = function, shared
    # Tasks create many objects and no garbage: frequent collection would take a fifth of the time.
    gc.set_threshold(1_000_000)
    # The parent handles Ctrl-C and shuts the pool down; workers killed by the signal would count as failures.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exits when the parent ends: a killed parent cannot stop its workers, which would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(task: Any) -> Any:
    return _function(_shared, task)
