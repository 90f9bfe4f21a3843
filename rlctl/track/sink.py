"""What every tracker is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Sink(Protocol):
    """A place metrics go to."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take one step's metrics."""

    def close(self, status: str) -> None:
        """Finish; called once."""
