"""trackio and MLflow as they are, where they are installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("logger", ["mlflow", "trackio"])
def test_one_that_is_not_installed_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], logger: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == logger] or [logger]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"rlctl.track.{logger}", raising=False)
    train(tmp_path / "run", logger, 1, 2)
    assert f"warning: {logger} failed and is disabled" in capsys.readouterr().err
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["step"] == 1
