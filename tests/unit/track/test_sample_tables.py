"""Tables of responses reach the trackers that show texts, with a column per term of the reward."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlctl.batch import Episode, Task, TokenSequence, Turn
from rlctl.reward.protocol import RewardResult
from rlctl.track.sink import SinkInputs
from rlctl.track.tracker import Tracker, build_tracker
from rlctl.train.saving import sample_rows, terms_of

ROWS = [
    {"prompt": "1+1=", "response": "2", "reward": 1.5, "reward/exact": 1.0, "log_ratio": 0.25},
    {"prompt": "1+1=", "response": "3", "reward": None, "reward/exact": None, "log_ratio": None},
]


def inputs(directory: Path) -> SinkInputs:
    return SinkInputs(directory, "project", "experiment", {"actor": {"lr": 1e-6}}, 2, 0)


def logged(name: str, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    tracker = build_tracker([name], inputs(directory))
    tracker.log_samples(1, ROWS)
    tracker.log(1, {"critic/score/mean": 0.5})
    tracker.close()


def test_rows_have_a_column_per_term_and_the_log_ratio() -> None:
    def episode(response: str, own: float | None) -> Episode:
        turn = Turn(torch.tensor([5, 6]), torch.tensor([-1.0, -0.5]), torch.zeros(2), "stop")
        parts = (TokenSequence.of_turn([1], turn),)
        return Episode(Task([1], "1+1=", 0), 0, parts, response, "completed", reward=own)

    episodes = [episode("2", 0.5), episode("3", None)]
    scores = torch.tensor([1.5, 0.0])
    parts = {"exact": torch.tensor([1.0, 0.0]), "style": torch.tensor([torch.nan, 0.25])}
    result = RewardResult(scores, torch.tensor([True, True]), parts)
    terms = terms_of(result, [episode.reward for episode in episodes])
    assert terms == [{"exact": 1.0, "environment": 0.5}, {"exact": 0.0, "style": 0.25}]
    trained = torch.tensor([-0.75, -0.5, torch.nan, torch.nan])
    first, second = sample_rows(episodes, [1.5, None], terms, trained)
    assert first == {
        "prompt": "1+1=",
        "response": "2",
        "reward": 1.5,
        "reward/environment": 0.5,
        "reward/exact": 1.0,
        "reward/style": None,
        "log_ratio": 0.25,
    }
    assert second.keys() == first.keys()
    assert (second["log_ratio"], second["reward/style"]) == (None, 0.25)


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    seen: list[tuple[dict[str, Any], int]] = []
    run = SimpleNamespace(log=lambda data, step: seen.append((data, step)), finish=lambda exit_code: None)
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    monkeypatch.setattr(wandb, "setup", lambda *_: None)
    logged("wandb", tmp_path / "run")
    [(data, step), (metrics, _)] = seen
    assert (step, list(metrics)) == (1, ["critic/score/mean"])
    assert data["completions"].columns == list(ROWS[0])
    assert data["completions"].data[0] == list(ROWS[0].values())


def test_mlflow_and_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins for the packages, which `test_other_trackers.py` uses where they are installed."""
    pandas = pytest.importorskip("pandas")
    seen: list[tuple[Any, ...]] = []
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: None,
        create_experiment=lambda name: "0",
        create_run=lambda place, run_name: SimpleNamespace(info=SimpleNamespace(run_id="r")),
        log_batch=lambda *a, **k: None,
        set_terminated=lambda *a: None,
        log_table=lambda run, data, artifact_file: seen.append((run, data, artifact_file)),
    )
    mlflow = {"mlflow": {}, "mlflow.entities": {"Metric": tuple, "Param": lambda *a: a}}
    mlflow["mlflow.entities"]["Metric"] = lambda *a: a
    mlflow["mlflow.tracking"] = {"MlflowClient": lambda: client}
    run = SimpleNamespace(log=lambda data, step: seen.append((data, step)), finish=lambda: None)
    table = {"init": lambda **_: run, "Table": lambda dataframe: dataframe}
    for name, content in {**mlflow, "trackio": table}.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("rlctl.track.mlflow", "rlctl.track.trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    logged("mlflow", tmp_path / "a")
    assert seen == [
        ("r", {key: [row[key] for row in ROWS] for key in ROWS[0]}, "completions/step_000001.json")
    ]
    seen.clear()
    logged("trackio", tmp_path / "b")
    assert isinstance(seen[0][0]["completions"], pandas.DataFrame)
    assert list(seen[0][0]["completions"].columns) == list(ROWS[0])
    for name in ("rlctl.track.mlflow", "rlctl.track.trackio"):
        monkeypatch.delitem(sys.modules, name)


def test_a_tracker_without_tables_gets_none_and_a_failing_one_is_dropped() -> None:
    class Plain:
        def log(self, step: int, metrics: object) -> None: ...

        def close(self, status: str) -> None: ...

    class Failing(Plain):
        def log_samples(self, step: int, rows: object) -> None:
            raise OSError("disk full")

    notes: list[str] = []
    tracker = Tracker(None, [Plain(), Failing()], show=notes.append)
    tracker.log_samples(1, ROWS)
    tracker.log(1, {})
    assert len(notes) == 1
    assert "Failing failed" in notes[0]
