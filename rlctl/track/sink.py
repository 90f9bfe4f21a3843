"""Interface of trackers, and what they are constructed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """A destination of metrics.

    A display may also have the methods `note(text)`, which shows a line to the user, and
    `begin_phase(phase)`, which shows a phase of `timing_s/*`, and the attribute `is_live`: it draws a panel.
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

    run_dir: Path  # exists
    project: str  # `trainer.project_name`
    experiment: str  # `trainer.experiment_name`
    config: dict[str, Any]  # the resolved spec as plain data; trackers get it without secrets
    total_steps: int  # of the whole run
    start_step: int  # steps already done, 0 for a new run
    is_stopping: Callable[[], bool] = lambda: False  # whether a stop after the current step was requested
