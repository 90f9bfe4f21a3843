"""trackio tracker: a local dashboard (`trackio show`). trackio reads its environment variables itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trackio
from pandas import DataFrame

from rlctl.track.sink import SAMPLES, SinkInputs


class TrackioSink:
    """A run of a trackio project; a resumed run, of the same directory name, continues it."""

    name = "trackio"

    def __init__(self, inputs: SinkInputs) -> None:
        self._run = trackio.init(
            project=inputs.project,
            name=inputs.run_dir.name,
            config=inputs.config,
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues one step."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Queues a table of responses."""
        self._run.log({SAMPLES: trackio.Table(dataframe=DataFrame(rows))}, step=step)

    def close(self, status: str) -> None:
        """Writes the queued steps."""
        self._run.finish()
