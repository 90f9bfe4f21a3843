"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from rlctl.run_files import create_directory
from rlctl.track.sink import SinkInputs


class TensorboardSink:
    """Writes metrics as scalars to event files; hides later steps of an earlier attempt (`purge_step`)."""

    name = "tensorboard"

    def __init__(self, inputs: SinkInputs) -> None:
        purge = inputs.start_step + 1 if inputs.start_step else None
        directory = inputs.run_dir / "tensorboard"
        create_directory(directory)
        self._writer = SummaryWriter(str(directory), purge_step=purge, flush_secs=15)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues the scalars of one step."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, float(value), step)

    def close(self, status: str) -> None:
        """Flushes and closes the files."""
        self._writer.close()
