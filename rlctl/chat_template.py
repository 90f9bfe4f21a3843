"""Renders messages with a chat template, which comes with a model, within a limit of processor time.

The sandbox of templates forbids access to Python's objects, but not loops without an end.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

#: Processor time of one rendering in seconds; templates need milliseconds.
RENDER_S = 10.0
#: Seconds between two checks of the threads that render.
_CHECK_S = 0.25


class TemplateTooSlow(Exception):
    """A template took longer than its limit."""


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """The messages as text; `options` are those of the tokenizer's `apply_chat_template`.

    Raises:
        Exception: the template refuses the messages, by Jinja's errors and any others.
        TemplateTooSlow: it does not end.
    """
    with time_limit(RENDER_S):
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    return text


@dataclass(slots=True, eq=False)
class _Limit:
    thread: int
    clock: int  # of the thread's processor time
    deadline: float  # on this clock
    is_over: bool = False


_limits: set[_Limit] = set()
_lock = threading.Lock()
_work = threading.Event()
_watcher: list[threading.Thread] = []


class time_limit:  # noqa: N801 - a context manager; several times as fast as one by a generator
    """Context that ends with `TemplateTooSlow` after `seconds` of this thread's processor time.

    An operation within one call of a function in C is not interrupted.
    """

    __slots__ = ("_limit", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        thread = threading.get_ident()
        deadline = time.thread_time() + self._seconds
        self._limit = limit = _Limit(thread, time.pthread_getcpuclockid(thread), deadline)
        with _lock:
            if not _watcher or not _watcher[0].is_alive():  # also in a process that was forked
                _watcher[:] = [threading.Thread(target=_watch, name="time-limits", daemon=True)]
                _watcher[0].start()
            _limits.add(limit)
            if not _work.is_set():
                _work.set()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        limit = self._limit
        with _lock:
            _limits.discard(limit)
            if limit.is_over:  # the exception may still be on its way
                _raise_in(limit.thread, None)
        if limit.is_over and kind in (None, TemplateTooSlow):
            raise _over(self._seconds) from None


def _over(seconds: float) -> TemplateTooSlow:
    return TemplateTooSlow(f"it takes more than {seconds:g} s")


def _watch() -> None:
    while _work.wait():
        time.sleep(_CHECK_S)
        with _lock:
            for limit in _limits:
                with suppress(OSError):  # the thread has ended
                    if not limit.is_over and time.clock_gettime(limit.clock) > limit.deadline:
                        limit.is_over = True
                        _raise_in(limit.thread, TemplateTooSlow)
            if not _limits:
                _work.clear()


def _raise_in(thread: int, exception: type[Exception] | None) -> None:
    """Raises an exception in another thread as soon as it runs Python code; None: withdraws it."""
    given = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), given)
