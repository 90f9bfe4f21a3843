"""Runs a slow sink in a separate thread, so that training never waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping

from rlctl.track.sink import Sink

#: Maximum number of queued steps; a sink that is further behind is disabled.
MAX_WAITING = 10_000
#: Seconds in which a sink must process the queue when the run ends.
CLOSE_S = 90.0


class BackgroundSink:
    """Runs another sink in a thread; keeps the order of steps.

    `start` constructs the sink in the current thread; its exceptions are not caught.
    """

    def __init__(self, name: str, start: Callable[[], Sink]) -> None:
        self.name = name
        self._sink = start()
        self._steps: queue.Queue[tuple[int, Mapping[str, float]] | str] = queue.Queue(MAX_WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a step to the thread's queue.

        Raises:
            Exception: the sink's exception from an earlier step.
            TimeoutError: the queue is full.
        """
        if self._error:
            raise self._error
        try:
            self._steps.put_nowait((step, dict(metrics)))
        except queue.Full:
            raise TimeoutError(f"{MAX_WAITING:,} steps wait for it") from None

    def close(self, status: str) -> None:
        """Waits until the sink has processed all steps and is closed, at most `CLOSE_S` seconds.

        If the queue is full, the sink is not closed and the queued steps are lost.

        Raises:
            Exception: the sink's exception.
            TimeoutError: the sink did not finish in time.
        """
        if not self._error and not self._steps.full():
            self._steps.put(status)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"not finished {CLOSE_S:.0f} s after the run; the remaining steps are not sent"
                )
        if self._error:
            raise self._error

    def _work(self) -> None:
        try:
            while not isinstance(entry := self._steps.get(), str):
                self._sink.log(*entry)
            self._sink.close(entry)
        except Exception as error:
            self._error = error
