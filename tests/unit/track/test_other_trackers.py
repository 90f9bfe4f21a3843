"""trackio and MLflow as they are, where they are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.track.sink import SinkInputs
from rlctl.track.tracker import build_tracker

CONFIG = {"actor": {"lr": 1e-6, "betas": [0.9, 0.95]}, "model": {"path": "embedded"}}


def train(run_dir: Path, logger: str, first: int, last: int, *, fails: bool = False) -> None:
    run_dir.mkdir(exist_ok=True)
    tracker = build_tracker([logger], SinkInputs(run_dir, "project", "experiment", CONFIG, last, first - 1))
    for step in range(first, last + 1):
        tracker.log(step, {"critic/score/mean": step / 4, "val/own/pass@4": 0.5})
    tracker.close("failed" if fails else "finished")
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == last


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    train(tmp_path / "run", "mlflow", 1, 3, fails=True)
    train(tmp_path / "run", "mlflow", 4, 6)
    assert "warning" not in capsys.readouterr().err
    client = MlflowClient()
    experiment = client.get_experiment_by_name("project")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "experiment"
    assert run.data.params["actor.lr"] == "1e-06"
    history = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert [(point.step, point.value) for point in history] == [(step, step / 4) for step in range(1, 7)]
    assert "val/own/pass_4" in run.data.metrics


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    train(tmp_path / "run-1", "trackio", 1, 3)
    train(tmp_path / "run-1", "trackio", 4, 6)
    assert "warning" not in capsys.readouterr().err
    logs = SQLiteStorage.get_logs("project", "run-1")
    assert [(log["step"], log["critic/score/mean"]) for log in logs] == [(n, n / 4) for n in range(1, 7)]


@pytest.mark.parametrize("logger", ["mlflow", "trackio", "wandb", "tensorboard"])
def test_one_that_is_not_installed_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], logger: str
) -> None:
    monkeypatch.setitem(sys.modules, logger, None)  # as if it were not there
    given = (f"trainer.logger=[console,{logger}]", f"trainer.run_dir={tmp_path}/run")
    for dry_run in ((), ("--dry-run",)):
        assert run(["train", *given, *dry_run]) == 4
        shown = capsys.readouterr()
        text = " ".join((shown.out + shown.err).split())
        assert f"{logger} is not installed" in text
        assert f"pip install {logger}, or leave {logger} out" in text
        assert "trainer.logger" in text
        assert not (tmp_path / "run").exists()
    assert run(["train", *given, "--dry-run", "--machine", "8xh100"]) == 0  # that machine may have it


def test_a_tracker_of_ones_own_names_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from rlctl.registry import TRACKERS\n"
        "@TRACKERS.register(label='mine', needs={'neptune_of_nobody'})\n"
        "def mine(inputs): ...\n"
    )
    assert run(["train", f"trainer.logger={file}:mine", f"trainer.run_dir={tmp_path}/run"]) == 4
    assert "pip install neptune_of_nobody" in " ".join(capsys.readouterr().err.split())
