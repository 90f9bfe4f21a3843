"""A run that ends early: its reason, its best step by name, its resume; terms of the reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.cli.app import run
from tests import runs

pytestmark = pytest.mark.usefixtures("embedded")


def test_a_run_ends_early_and_its_best_step_has_a_name(
    tmp_path: Path, embedded_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    stop = ("trainer.early_stop.patience=2", "trainer.early_stop.min_delta=0.9")
    terms = 'reward.terms=[{"name": "exact", "weight": 0.5}]'
    given = ("trainer.total_training_steps=5", "trainer.test_freq=1", *stop, terms)
    runs.train(directory, *given, env={"RLCTL_CACHE": str(embedded_cache)})
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["step"], summary["interrupted"]) == (2, True)
    assert "has not improved by more than 0.9 in 2 values" in summary["early_stop"]
    assert run(["runs", str(tmp_path)]) == 0
    assert "stopped" in capsys.readouterr().out
    assert run(["samples", str(directory), "--step", "best", "--json"]) == 0
    [first, *_] = json.loads(capsys.readouterr().out)
    assert first["reward"] == 0.5 * first["terms"]["exact"]
    assert run(["samples", str(directory), "--step", "2"]) == 0
    assert "exact " in capsys.readouterr().out
    assert run(["export", str(directory), "--step", "best", "--output", str(tmp_path / "best")]) == 0
    assert (tmp_path / "best" / "config.json").is_file()
    assert run(["report", str(directory)]) == 0
    assert "(exact " in (directory / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert run(["samples", str(directory), "--step", "last"]) == 2
    assert "or best" in " ".join(capsys.readouterr().err.split())
    # A resume has the log, and with it the state: the next validation ends the run again.
    assert runs.resume(directory, "trainer.early_stop.patience=3").wait() == 0
    assert json.loads((directory / "summary.json").read_text())["step"] == 3
