"""What every reader fills."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlctl.diagnose.readers.collect import Collector
from rlctl.diagnose.readers.source import Watch
from rlctl.diagnose.table import Framework


@dataclass(slots=True)
class Reading:
    """A log while it is read.

    Attributes:
        collector: takes the rows.
        limit: rows after which a reader may stop, for a first look; None reads everything.
        hint: the framework, where the format tells it.
        config: the run's configuration, where the log carries one.
        notes: what had to be tolerated.
        watch: told how far a file was read, where that is known.
    """

    collector: Collector
    limit: int | None = None
    hint: Framework | None = None
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    watch: Watch | None = None

    @property
    def is_full(self) -> bool:
        """Whether a first look has seen enough."""
        return self.limit is not None and self.collector.num_rows >= self.limit
