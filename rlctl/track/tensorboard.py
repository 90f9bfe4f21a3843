"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorboardSink:
    """Writes metrics as scalars to event files in `directory`.

    Args:
        directory: created if needed.
        start_step: steps already done; later steps of an earlier attempt are hidden (`purge_step`).
    """

    name = "tensorboard"

    def __init__(self, directory: Path, start_step: int) -> None:
        purge = start_step + 1 if start_step else None
        self._writer = SummaryWriter(str(directory), purge_step=purge, flush_secs=15)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues the scalars of one step."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, float(value), step)

    def close(self, status: str) -> None:
        """Flushes and closes the files."""
        del status
        self._writer.close()
