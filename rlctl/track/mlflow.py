"""MLflow tracker. MLflow reads `MLFLOW_TRACKING_URI` and its other environment variables itself."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from rlctl.files import read_text, write_text
from rlctl.run_spec.keys import flat
from rlctl.track.sink import SAMPLES, SinkInputs

_RUN_ID_FILE = ".mlflow_run_id"
#: Limits of MLflow servers: metrics and parameters per request, characters of a parameter value.
_MAX_METRICS, _MAX_PARAMS, _MAX_VALUE = 1000, 100, 6000
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
#: Characters that MLflow does not allow in metric names.
_UNKNOWN = re.compile(r"[^\w\-. :/]")


class MlflowSink:
    """An MLflow run in the experiment with the project's name; a resumed run continues it."""

    name = "mlflow"

    def __init__(self, inputs: SinkInputs) -> None:
        self._client = MlflowClient()
        file = inputs.run_dir / _RUN_ID_FILE
        if file.is_file():
            self._id = read_text(file).strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(inputs.project)
        place = known.experiment_id if known else self._client.create_experiment(inputs.project)
        self._id = self._client.create_run(place, run_name=inputs.experiment).info.run_id
        # The parameters are the leaves of the spec.
        params = [Param(key, str(value)[:_MAX_VALUE]) for key, value in flat(inputs.config).items()]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + _MAX_PARAMS])
        write_text(file, self._id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends one step; replaces characters that MLflow does not allow in names by `_`."""
        now = int(time.time() * 1000)
        found = [Metric(_UNKNOWN.sub("_", key), float(value), now, step) for key, value in metrics.items()]
        for first in range(0, len(found), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=found[first : first + _MAX_METRICS])

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Stores a table of responses as an artifact of the step."""
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        self._client.log_table(self._id, columns, f"{SAMPLES}/step_{step:06d}.json")

    def close(self, status: str) -> None:
        """Sends the final status of the run."""
        self._client.set_terminated(self._id, _STATUS.get(status, "FINISHED"))
