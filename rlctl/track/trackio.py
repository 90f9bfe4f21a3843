"""trackio: a local dashboard (`trackio show`). Its environment variables mean what trackio says they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trackio


class TrackioSink:
    """One run of a trackio project; a resumed run continues it.

    Args:
        project: of trackio.
        name: of the run, a name of its own: another run of that name would be continued.
        config: the resolved spec, without secrets.
    """

    name = "trackio"

    def __init__(self, project: str, name: str, config: dict[str, Any]) -> None:
        self._run = trackio.init(project=project, name=name, config=config, resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one step."""
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        """Write what is queued."""
        del status
        self._run.finish()
