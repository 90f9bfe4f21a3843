"""Runs the calls of a user's function that waits, for a server say, at the same time in one process.

An `async` function runs in the process's one event loop, so that clients of its module stay usable; a plain
function runs in threads, if `reward.threads` allows it. Standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

#: Most calls of an `async` function at the same time in one process.
MOST_AT_ONCE = 128
#: Share of its time limit in which the process of a call that reached it computed, from which the call is
#: repeated alone: calls beside it may have taken the time.
_BUSY = 0.5

#: Result of a call: its number, and what it returned or raised.
Outcome = tuple[int, Any]


class TookTooLong(Exception):
    """A call reached its time limit; `is_busy`: others may have taken its time."""

    def __init__(self, is_busy: bool) -> None:
        super().__init__(is_busy)
        self.is_busy = is_busy


class EventLoop:
    """The event loop of a process, for all calls."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def result(self, value: Any) -> Any:
        """The value itself, or what it is when it has been awaited."""
        if not inspect.isawaitable(value):
            return value
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(value))

    def together(
        self, calls: list[Callable[[], Awaitable[Any]]], limit_s: float, tell: Callable[[Outcome], None]
    ) -> None:
        """Awaits all calls at the same time, and tells each outcome when it is there."""
        slots = asyncio.Semaphore(MOST_AT_ONCE)

        async def one(number: int, call: Callable[[], Awaitable[Any]]) -> None:
            async with slots:
                computed = time.process_time()
                found: Any
                try:
                    async with asyncio.timeout(limit_s) as limit:
                        found = await call()
                except (Exception, asyncio.CancelledError) as error:
                    found = error if isinstance(error, Exception) else RuntimeError("it cancelled itself")
                    if limit.expired():
                        found = TookTooLong(time.process_time() - computed > _BUSY * limit_s)
            tell((number, found))

        async def every() -> None:
            await asyncio.gather(*(one(number, call) for number, call in enumerate(calls)))

        self.result(every())


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def in_threads(calls: list[Callable[[], Any]], count: int, tell: Callable[[Outcome], None]) -> None:
    """Makes the calls in threads, and tells each outcome when it is there; they have no time limit here."""
    with ThreadPoolExecutor(count, "grading") as threads:
        numbers: dict[Future[Any], int] = {threads.submit(call): n for n, call in enumerate(calls)}
        for future in as_completed(numbers):
            error = future.exception()
            tell((numbers[future], future.result() if error is None else error))


def is_async(function: Any) -> bool:
    """Whether a function, or what a partial or an object calls, is `async`."""
    while isinstance(function, partial):
        function = function.func
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)
