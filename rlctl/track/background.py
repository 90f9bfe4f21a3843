"""A sink that may be slow, or hang: a thread of its own hands it the steps, and training never waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping

from rlctl.track.sink import Sink

#: Steps that may wait; a sink that is further behind is given up.
MAX_WAITING = 10_000
#: Seconds that a sink has to take what waits when the run ends.
CLOSE_S = 90.0


class BackgroundSink:
    """Runs another sink in a thread, in order.

    Args:
        name: of the sink.
        start: builds it, in this thread; whatever it raises is raised here.
    """

    def __init__(self, name: str, start: Callable[[], Sink]) -> None:
        self.name = name
        self._sink = start()
        self._steps: queue.Queue[tuple[int, Mapping[str, float]] | str] = queue.Queue(MAX_WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Leave a step to the thread.

        Raises:
            Exception: what the sink raised on an earlier step.
            TimeoutError: too many steps wait.
        """
        if self._error:
            raise self._error
        try:
            self._steps.put_nowait((step, dict(metrics)))
        except queue.Full:
            raise TimeoutError(f"{MAX_WAITING:,} steps wait for it") from None

    def close(self, status: str) -> None:
        """Wait until it has taken everything, at most `CLOSE_S` seconds.

        Raises:
            Exception: what the sink raised.
            TimeoutError: it was not done in time.
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
