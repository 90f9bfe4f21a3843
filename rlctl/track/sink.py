"""Interface of trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """A destination of metrics."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one step's metrics."""

    def close(self, status: str) -> None:
        """Closes the sink; called once."""
