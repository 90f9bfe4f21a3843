"""trackio tracker: a local dashboard (`trackio show`). trackio reads its environment variables itself."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from rlctl.track.sink import SinkInputs


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

    def close(self, status: str) -> None:
        """Writes the queued steps."""
        self._run.finish()
