"""Interface of trackers, what they are constructed from, and a thread for slow ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

#: Name of the table of responses.
SAMPLES = "completions"
#: Maximum number of queued steps; a sink that is further behind is disabled.
MAX_WAITING = 10_000
#: Seconds in which a sink must process the queue when the run ends.
CLOSE_S = 90.0


class Sink(Protocol):
    """A destination of metrics.

    A display may also have the methods `note(text)`, which shows a line to the user, and
    `begin_phase(phase)`, which shows a phase of `timing_s/*`, and the attribute `is_live`: it draws a panel.
    A destination of texts may have `log_samples(step, rows)`: a table of responses, one mapping per row with
    the same keys.
    Messages use its attribute `name`, or the name of its class.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one step's metrics."""

    def close(self, status: str) -> None:
        """Closes the sink; called once."""


def name_of(sink: Sink) -> str:
    """The name of a sink in messages."""
    return str(getattr(sink, "name", type(sink).__name__))


@dataclass(frozen=True, slots=True)
class SinkInputs:
    """Inputs from which a tracker registered in `rlctl.registry.TRACKERS` is constructed."""

    run_dir: Path  # directory of the run; it exists
    project: str  # `trainer.project_name`
    experiment: str  # `trainer.experiment_name`
    config: dict[str, Any]  # the resolved spec as plain data, without secrets
    total_steps: int  # of the whole run
    start_step: int  # steps already done, 0 for a new run
    is_stopping: Callable[[], bool] = lambda: False  # whether a stop after the current step was requested


class BackgroundSink:
    """Runs a slow sink in a thread, so that training never waits for it; keeps the order of steps."""

    def __init__(self, sink: Sink) -> None:
        self.name = name_of(sink)
        self._sink = sink
        self._steps: queue.Queue[Callable[[], None] | str] = queue.Queue(MAX_WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a step to the thread's queue.

        Raises:
            Exception: the sink's exception from an earlier step.
            TimeoutError: the queue is full.
        """
        self._put(partial(self._sink.log, step, dict(metrics)))

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Adds a table of responses to the thread's queue; raises as `log`."""
        if hasattr(self._sink, "log_samples"):
            self._put(partial(self._sink.log_samples, step, rows))

    def close(self, status: str) -> None:
        """Waits until the sink has processed all steps and is closed, at most `CLOSE_S` seconds.

        Raises:
            Exception: the sink's exception.
            TimeoutError: the queue is full, so the sink is not closed and queued steps can be lost, or the
                sink did not finish in time.
        """
        self._put(status)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(
                f"not finished {CLOSE_S:.0f} s after the run; the remaining steps are not sent"
            )
        if self._error:
            raise self._error

    def _put(self, entry: Callable[[], None] | str) -> None:
        if self._error:
            raise self._error
        try:
            self._steps.put_nowait(entry)
        except queue.Full:
            raise TimeoutError(f"{MAX_WAITING:,} steps are waiting for it") from None

    def _work(self) -> None:
        try:
            while not isinstance(entry := self._steps.get(), str):
                entry()
            self._sink.close(entry)
        except Exception as error:
            self._error = error
