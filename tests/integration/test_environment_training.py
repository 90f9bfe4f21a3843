"""Training in a user's environment: whole runs of the built-in model."""

from __future__ import annotations

from pathlib import Path

from tests import runs
from tests.two_tries import options, reproducible


def test_a_resumed_run_in_lockstep_is_bitwise_the_same(tmp_path: Path, embedded: Path) -> None:
    given = (*options(tmp_path), "trainer.save_freq=2")
    whole = runs.train(tmp_path / "whole", *given, "trainer.total_training_steps=4")
    run = runs.train(tmp_path / "run", *given, "trainer.total_training_steps=2")
    job = runs.resume(run, "trainer.total_training_steps=4")
    assert job.wait() == 0, job.output[-4000:]
    assert reproducible(run) == reproducible(whole)
    lines = runs.metrics(whole)
    assert all(0.0 < line["critic/score/mean"] < 1.0 for line in lines)
    assert all(1.0 < line["episode/num_turns/mean"] < 2.0 for line in lines)
    assert all(line["episode/num_failed"] == 0.0 for line in lines)
    assert {"rollout_corr/turn_1/kl", "rollout_corr/turn_2/kl", "episode/stop/completed"} <= lines[-1].keys()


def test_faults_are_counted_and_training_goes_on(tmp_path: Path, embedded: Path) -> None:
    run = runs.train(tmp_path / "run", *options(tmp_path, fails=True), "trainer.total_training_steps=3")
    lines = runs.metrics(run)
    failed = sum(line["episode/num_failed"] for line in lines)
    assert failed == len(list(tmp_path.glob("failed-*"))) > 0
    assert all(line["rollout_corr/skipped_updates"] == 0.0 for line in lines)
    assert all(line["critic/score/mean"] > 0.0 for line in lines)
