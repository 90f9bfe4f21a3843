"""Stops a run on a signal: the first finishes the step and saves, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

#: Seconds. A signal this soon after the first is a duplicate: a terminal and Slurm signal every process,
#: and the launcher also forwards the signal to its ranks.
_DUPLICATE_S = 1.0
_STOPPING = b"\nstopping after this step is saved; press Ctrl-C again to exit now\n"


@dataclass
class StopRequest:
    """The signal that requested the end of the run, if any."""

    signal_number: int | None = None
    at_once: bool = False
    """End the process at the first signal: while ranks wait for one another there is nothing to save."""
    is_shown: bool = False
    """Whether a live display shows that the run is stopping: an additional printed line would corrupt it."""

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells report it: 130 for SIGINT (Ctrl-C), 143 for SIGTERM (preemption)."""
        return 128 + (self.signal_number or 0)


def end_process(signal_number: int) -> None:
    """Ends the process at once, with the exit code that a shell reports for the signal."""
    os._exit(128 + signal_number)


@contextmanager
def catching_signals(on_second: Callable[[int], None] = end_process) -> Iterator[StopRequest]:
    """Context in which SIGINT and SIGTERM set a `StopRequest`; the second signal calls `on_second`.

    Only the main thread can handle signals: in another thread no signal stops the run.
    """
    request = StopRequest()
    first_signal_at = 0.0

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal first_signal_at
        if request.at_once:
            os._exit(128 + number)
        if request.signal_number is None:
            request.signal_number, first_signal_at = number, time.monotonic()
            if os.environ.get("RANK", "0") == "0" and not request.is_shown:  # one rank prints
                # A handler must not use buffered output. stderr may be closed, with its ssh session.
                with suppress(OSError):
                    os.write(2, _STOPPING)
        elif time.monotonic() - first_signal_at > _DUPLICATE_S:
            on_second(number)

    is_main = threading.current_thread() is threading.main_thread()
    handled = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, on_signal) for number in handled}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
