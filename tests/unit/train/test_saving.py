"""When a step is saved, and whether the disk has enough space."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.errors import RunFailure
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.model_size import checkpoint_bytes
from rlctl.train import saving
from rlctl.train.preflight import check_disk
from rlctl.train.saving import Saver, best_validation


class Run:
    """Inputs of a saver with one rank."""

    def __init__(self, *overrides: str) -> None:
        self.spec = load_spec([], [], ["trainer.total_training_steps=100", *overrides]).spec
        self.run_dir = Path("no run")
        self.actor, self.critic = SimpleNamespace(holds_state=True), None
        self.ranks = SimpleNamespace(is_main=True, sum=list)
        self.stop = SimpleNamespace(signal_number=0)
        self.history: list[dict[str, float]] = []
        self.stopped_because, self.total_steps = "", 100

    def saved(self, saver: Any, step: int, **validation: float) -> bool:
        metrics = {f"val/{source}/reward_mean": value for source, value in validation.items()}
        self.history.append({"step": float(step), **metrics})
        stops, saves = saver.after(step, metrics)
        assert not stops
        return bool(saves)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(saving, "save_checkpoint", lambda *_, **__: None)
    return now


def test_by_time_and_by_steps(clock: list[float]) -> None:
    run = Run("trainer.save_every=90s", "trainer.save_freq=50")
    saver = Saver(run)  # type: ignore[arg-type]
    assert not run.saved(saver, 1)
    clock[0] += 89.0
    assert not run.saved(saver, 2)
    clock[0] += 1.0
    assert run.saved(saver, 3)
    saver.save(3)
    assert not run.saved(saver, 4)
    assert run.saved(saver, 50)
    assert run.saved(saver, 100)  # the last
    only = Run("trainer.save_every=null")
    saver = Saver(only)  # type: ignore[arg-type]
    clock[0] += 1e9
    assert not only.saved(saver, 1)


def test_by_time_only_after_a_step_that_a_resumed_run_can_go_on_from(clock: list[float]) -> None:
    run = Run("rollout.sync_every=4")
    saver = Saver(run)  # type: ignore[arg-type]
    clock[0] += 1801.0
    assert [step for step in range(1, 9) if run.saved(saver, step)] == [4, 8]


def test_validation_better_than_all_before_is_saved_also_after_a_resume(clock: list[float]) -> None:
    run = Run("trainer.test_freq=1")
    saver = Saver(run)  # type: ignore[arg-type]
    assert run.saved(saver, 1, a=0.2, b=0.4)
    assert not run.saved(saver, 2, a=0.3, b=0.3)  # as good
    assert run.saved(saver, 3, a=0.1, b=0.6)
    resumed = Saver(run)  # type: ignore[arg-type]
    assert not run.saved(resumed, 4, a=0.1, b=0.5)
    assert best_validation(run.history) == (3, 0.35)
    worse = Run("trainer.test_freq=1")  # than the model that it started from: still the best of its own
    worse.history.append({"step": 0.0, "val/a/reward_mean": 0.9})
    saver = Saver(worse)  # type: ignore[arg-type]
    assert [worse.saved(saver, step, a=value) for step, value in ((1, 0.2), (2, 0.5), (3, 0.4))] == [
        True,
        True,
        False,
    ]
    assert saver._best_step() == 2
    assert best_validation(worse.history) == (2, 0.5)
    rarely = Run("trainer.test_freq=3", "rollout.sync_every=4")
    assert rarely.saved(Saver(rarely), 3, a=0.2)  # type: ignore[arg-type]
    never = Run("trainer.test_freq=1", "trainer.keep_best=false")
    assert not never.saved(Saver(never), 1, a=0.2)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0min", "soon", "-5s", "30 days"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    from rlctl.errors import SpecError

    with pytest.raises(SpecError, match="30min or 2h"):
        Run(f"trainer.save_every={text}")


def test_a_full_disk_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = Run()
    run.run_dir = tmp_path
    needed = checkpoint_bytes(run.spec)
    assert needed is not None
    usage = shutil.disk_usage(tmp_path)
    for free, word in ((needed - 1, "error"), (needed + 1, "warning"), (9 * needed, None)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert [problem.severity for problem in check_disk(run.spec)] == ([word] if word else [])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(RunFailure, match="not enough disk space for the checkpoint of step 7"):
        saving._require_space(run, 7)
    older = tmp_path / "checkpoints/step_000001/engine"  # what it really took counts
    older.mkdir(parents=True)
    (older / "state").write_bytes(b"s" * 10)
    saving._require_space(run, 7)


def test_the_summary_averages_a_metric_over_the_steps_that_have_it(tmp_path: Path) -> None:
    """A step whose update was withheld has a score, and no effective sample size."""
    ess = "rollout_corr/rollout_is_raw_eff_sample_size"
    run: Any = Run()
    run.run_dir, run.start_step, run.policy_version, run.ended_early = tmp_path, 0, 3, ""
    for step, sizes in enumerate(({}, {ess: 0.5}, {ess: 0.25}, {}), 1):
        run.history.append(
            {"step": float(step), "timing_s/step": 1.0, "critic/score/mean": step / 8, **sizes}
        )
    saving.write_summary(run)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["first"] == {"critic/score/mean": 0.1875, ess: 0.5}
    assert summary["last"] == {"critic/score/mean": 0.4375, ess: 0.25}
