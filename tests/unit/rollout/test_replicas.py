"""Servers of this machine that cannot even be started."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import EnvironmentFailure, RunFailure
from rlctl.rollout.replicas import Replicas, ReplicaSettings


def test_a_machine_that_starts_no_process_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    settings = ReplicaSettings(dtype="float32", max_model_len=8, start_timeout=60.0)
    servers = Replicas(1, settings, lambda: tmp_path, tmp_path / "logs")
    begun = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=os.strerror(errno.EAGAIN)):
        servers.start()
    assert time.monotonic() - begun < 30
    with pytest.raises(RunFailure, match="cannot be started"):
        servers.check()


def test_further_arguments_come_last() -> None:
    settings = ReplicaSettings(dtype="float32", max_model_len=8, more_arguments=("--block-size", "32"))
    assert settings.arguments("model")[-2:] == ["--block-size", "32"]
