"""Runs tasks in this process, in local worker processes or on Ray. Results keep the order of the tasks."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from rlctl.errors import EnvironmentFailure, RlctlError, RunFailure, first_line
from rlctl.prepare.request import ParallelEngine

Shared = TypeVar("Shared")
Task = TypeVar("Task")
Result = TypeVar("Result")

#: Tasks submitted per worker ahead of the oldest pending result.
AHEAD = 2
#: Tasks of one Ray Data run: enough to keep a cluster busy, few enough to fit in memory.
RAY_TASKS = 128
RAY_INSTALL = 'pip install "rlctl[ray]"'


def run(
    engine: ParallelEngine,
    function: Callable[[Shared, Task], Result],
    shared: Shared,
    tasks: Iterable[Task],
    workers: int,
) -> Iterator[tuple[Task, Result]]:
    """Yields each task with `function(shared, task)`, in order.

    Workers import `function` by name, and receive `shared` once. `tasks` are consumed lazily, only a few
    ahead of the results. With 0 or 1 local workers the tasks run in this process.

    Raises:
        RunFailure: a worker died.
        EnvironmentFailure: Ray is not installed or does not start.
    """
    if engine == "ray":
        return _on_ray(function, shared, tasks)
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


def _on_ray(
    function: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
) -> Iterator[tuple[Task, Result]]:
    ray = _start_ray()
    held = ray.put(pickle.dumps((function, pickle.dumps(shared), Path.cwd())))
    left = iter(tasks)
    while batch := list(islice(left, RAY_TASKS)):
        items = [{"task": pickle.dumps(task)} for task in batch]
        given = ray.data.from_items(items, override_num_blocks=len(items))
        done = given.map(_ray_work, fn_kwargs={"held": held})
        try:
            for task, row in zip(batch, done.iter_rows(), strict=True):
                result = pickle.loads(row["result"])
                if isinstance(result, RlctlError):
                    raise result
                yield task, result
        except ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
                type(error).__name__
            ]
            causes = (line for line in lines if re.match(r"[\w.]+(Error|Exception|Failure|Exit)\b", line))
            what = f"a Ray task failed: {next(causes, lines[-1])}"  # the relevant line of a long message
            raise RunFailure(what, fix="see Ray's logs") from error


def _start_ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise EnvironmentFailure("Ray is not installed", where="--engine ray", fix=RAY_INSTALL) from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = {} if "RAY_ADDRESS" in os.environ else {"include_dashboard": False}
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **own)
        except Exception as error:  # connection, port and memory errors have no common base
            what = f"Ray does not start: {first_line(error)}"
            raise EnvironmentFailure(what, fix="see `ray status`") from error
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors are raised as exceptions
    return ray


@lru_cache(maxsize=1)  # each worker process builds its tokenizer once
def _opened(held: Any) -> Any:
    import ray

    function, shared, directory = pickle.loads(ray.get(held))
    os.chdir(directory)  # for relative paths: Ray workers start in the cluster's directory
    return function, pickle.loads(shared)


def _ray_work(row: dict[str, bytes], held: Any) -> dict[str, bytes]:
    try:
        function, shared = _opened(held)
        result = function(shared, pickle.loads(row["task"]))
    except RlctlError as error:  # returned, because Ray would wrap a raised error
        result = error
    return {"result": pickle.dumps(result)}
