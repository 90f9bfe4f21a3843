"""trackio tracker: a local dashboard (`trackio show`). trackio reads its environment variables itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trackio


class TrackioSink:
    """A run of a trackio project; a resumed run continues it.

    Args:
        project: name of the trackio project.
        name: name of the run; must be unique, because trackio continues an existing run with this name.
        config: the resolved spec, without secrets.
    """

    name = "trackio"

    def __init__(self, project: str, name: str, config: dict[str, Any]) -> None:
        self._run = trackio.init(project=project, name=name, config=config, resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues one step."""
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        """Writes the queued steps."""
        del status
        self._run.finish()
