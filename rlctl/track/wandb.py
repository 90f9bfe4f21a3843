"""Weights & Biases. `WANDB_MODE`, `WANDB_API_KEY`, `WANDB_BASE_URL` … mean what W&B says they mean."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from rlctl.files import write_text

#: Seconds W&B may take to start, to ask for a login, and to upload the rest at the end.
INIT_TIMEOUT, LOGIN_TIMEOUT, FINISH_TIMEOUT = 30.0, 30.0, 60.0
_RUN_ID_FILE = ".wandb_run_id"


class WandbSink:
    """One W&B run, its files in `run_dir/wandb`; a resumed run continues it.

    Args:
        run_dir: existing run directory.
        project: W&B project.
        experiment: run name.
        config: the resolved spec, without secrets.

    Raises:
        Exception: whatever W&B raises when it cannot start; the caller goes on without it.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, project: str, experiment: str, config: dict[str, Any]) -> None:
        settings = _settings()
        wandb.setup(settings)  # the question for an API key reads its timeout from here only
        self._run = wandb.init(
            project=project,
            name=experiment,
            id=_run_id(run_dir),
            resume="allow",
            dir=str(run_dir),
            config=config,
            settings=settings,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one step; W&B uploads in a process of its own."""
        self._run.log(dict(metrics), step=step)

    def close(self, status: str) -> None:
        """Upload what is left, for at most `FINISH_TIMEOUT` seconds; the files stay for `wandb sync`."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _settings() -> wandb.Settings:
    """Bounded waits, no output on our terminal, and no record of the command line, which may hold secrets."""
    wanted = {
        "init_timeout": INIT_TIMEOUT,
        "login_timeout": LOGIN_TIMEOUT,
        "finish_timeout": FINISH_TIMEOUT,
        "console": "off",
        "quiet": True,
        "x_disable_meta": True,
        "disable_job_creation": True,
    }
    # Older versions know fewer settings and refuse unknown ones.
    return wandb.Settings(
        **{key: value for key, value in wanted.items() if key in wandb.Settings.model_fields}
    )


def _run_id(run_dir: Path) -> str:
    """The run's W&B id, the same after a resume."""
    path = run_dir / _RUN_ID_FILE
    if not path.exists():
        write_text(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8").strip()
