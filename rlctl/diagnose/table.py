"""A run's log as one table: step × metric, under the names of `rlctl.metric_names`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlctl.spec.run import RunSpec


@dataclass(frozen=True, slots=True)
class Series:
    """The finite values of one metric, and the steps they belong to (both (M,), steps ascending)."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Table:
    """What was logged.

    Attributes:
        steps: (N,) strictly ascending.
        columns: metric → (N,) values, NaN where the step did not log it or logged no finite number.
        nonfinite: metric → the steps at which NaN or an infinity was logged.
        names: every key seen in the log, those not kept as columns included.
    """

    steps: NDArray[np.int64]
    columns: Mapping[str, NDArray[np.float64]]
    nonfinite: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    names: frozenset[str] = frozenset()

    def series(self, key: str) -> Series:
        """The metric's finite values; empty if it was never logged."""
        values = self.columns.get(key)
        if values is None:
            return Series(self.steps[:0], np.empty(0))
        logged = np.isfinite(values)
        return Series(self.steps[logged], values[logged])

    def aligned(self, *keys: str) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        """Steps at which all of the metrics are finite, and each one's values there."""
        columns = [self.columns.get(key, np.full(len(self.steps), np.nan)) for key in keys]
        logged = np.logical_and.reduce([np.isfinite(column) for column in columns])
        return self.steps[logged], [column[logged] for column in columns]


@dataclass(frozen=True, slots=True)
class RunLog:
    """What is diagnosed.

    Attributes:
        path: the log file.
        table: its content.
        spec: of the run, if its `spec.yaml` lies beside the log.
        notes: what had to be tolerated when reading.
    """

    path: Path
    table: Table
    spec: RunSpec | None = None
    notes: tuple[str, ...] = ()

    @property
    def updates_per_batch(self) -> int | None:
        """Optimizer steps on one batch; None without a spec."""
        spec = self.spec
        if spec is None:
            return None
        return spec.data.train_batch_size // spec.ppo_mini_batch_size * spec.actor.ppo_epochs

    @property
    def gap_is_mismatch(self) -> bool:
        """Whether the logged gap between the policies can only come from two implementations.

        In bypass mode the trained policy is compared as it moves through a batch's updates, and stale
        samples come from older weights: there the gap holds the policy's own progress too.
        """
        if self.spec is None:
            return False
        staleness = self.table.series("training/staleness_max").values
        if len(staleness) and staleness.max() > 0.0:
            return False
        return not self.spec.algorithm.rollout_correction.bypass_mode or self.updates_per_batch == 1
