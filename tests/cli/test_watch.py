"""`rlctl watch`: the phases of a run that runs elsewhere."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

from rlctl.cli import watch
from rlctl.cli.app import run
from rlctl.track.heartbeats import Beat, NodeFile
from rlctl.track.run_dir import HOLDER_FILE
from tests.cli.test_report_command import a_run


def test_phases_are_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_run(tmp_path / "a")
    (path / "metrics.jsonl").unlink()
    holder = path / HOLDER_FILE
    holder.write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}))
    node = NodeFile(path, 0, size=1)
    places = iter(["reading the prompts", "reading the prompts", "loading m\x1b[2J", None])

    def next_phase(_: float) -> None:
        if place := next(places):
            node.write(0, Beat(1, 1, place, 0.0, "host", 1))
        else:
            holder.unlink()

    monkeypatch.setattr(watch.time, "sleep", next_phase)
    assert run(["watch", str(path), "--plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["starting", "reading the prompts"]
    assert lines[2].startswith("loading m")
    assert "\x1b" not in lines[2]
    assert lines[3] == "empty after step 0"
