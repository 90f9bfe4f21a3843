"""Weights & Biases tracker. W&B reads `WANDB_MODE`, `WANDB_API_KEY`, `WANDB_BASE_URL` … itself.

It also reads the user's `~/.config/wandb/settings`, but no settings in the working or the run directory.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from rlctl.files import read_text, write_text
from rlctl.run_files import create_directory
from rlctl.track.sink import SAMPLES, SinkInputs

#: Time limits of W&B in seconds: start, login prompt, upload of the remaining data at the end.
INIT_TIMEOUT, LOGIN_TIMEOUT, FINISH_TIMEOUT = 30.0, 30.0, 60.0
_RUN_ID_FILE = ".wandb_run_id"


class WandbSink:
    """A W&B run with its files in `run_dir/wandb`; a resumed run continues it.

    Raises:
        Exception: W&B's exception if it cannot start; the caller continues without W&B.
    """

    name = "wandb"

    def __init__(self, inputs: SinkInputs) -> None:
        create_directory(inputs.run_dir / "wandb")
        settings = _settings()
        with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
            # W&B would also read `wandb/settings` in the working directory. It may be someone else's, and
            # name the server that gets the API key. The prompt for a key reads its timeout only from here.
            wandb.setup(settings)
        self._run = wandb.init(
            project=inputs.project,
            name=inputs.experiment,
            id=_run_id(inputs.run_dir),
            resume="allow",
            dir=str(inputs.run_dir),
            config=inputs.config,
            settings=settings,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues one step; W&B uploads in a separate process."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Queues a table of responses."""
        columns = list(rows[0]) if rows else []
        table = wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({SAMPLES: table}, step=step)

    def close(self, status: str) -> None:
        """Uploads remaining data for at most `FINISH_TIMEOUT` seconds; files stay for `wandb sync`."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _settings() -> wandb.Settings:
    """Limits waits; disables terminal output and the record of the command line (it can contain secrets)."""
    wanted = {
        "init_timeout": INIT_TIMEOUT,
        "login_timeout": LOGIN_TIMEOUT,
        "finish_timeout": FINISH_TIMEOUT,
        "console": "off",
        "quiet": True,
        "x_disable_meta": True,
        "disable_job_creation": True,
    }
    # Older versions have fewer settings and reject unknown ones.
    return wandb.Settings(
        **{key: value for key, value in wanted.items() if key in wandb.Settings.model_fields}
    )


def _run_id(run_dir: Path) -> str:
    """W&B id of the run; the same after a resume."""
    path = run_dir / _RUN_ID_FILE
    if not path.exists():
        write_text(path, secrets.token_hex(4))
    return read_text(path).strip()
