"""Interface of trackers, and what they are constructed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """A destination of metrics."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one step's metrics."""

    def close(self, status: str) -> None:
        """Closes the sink; called once."""


@dataclass(frozen=True, slots=True)
class SinkInputs:
    """Inputs from which a tracker registered in `rlctl.registry.TRACKERS` is constructed.

    Attributes:
        run_dir: existing run directory.
        project, experiment: `trainer.project_name` and `trainer.experiment_name`.
        config: the resolved spec as plain data; trackers get it without secrets.
        total_steps: steps of the whole run.
        start_step: steps already done, 0 for a new run.
        is_stopping: returns whether a stop after the current step was requested.
    """

    run_dir: Path
    project: str
    experiment: str
    config: dict[str, Any]
    total_steps: int
    start_step: int
    is_stopping: Callable[[], bool] = lambda: False
