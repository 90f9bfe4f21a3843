"""A run that was started on two ranks continues on one, with the metrics of one that did not stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import runs

STEPS = ("trainer.save_freq=2", "trainer.logger=[]")
STAGE, REFERENCE = "engine.zero_stage=2", ("actor.use_kl_loss=true", "algorithm.adv_estimator=gae")


@pytest.mark.parametrize("more", [(STAGE,), (STAGE, REFERENCE[1]), ("engine.name=fsdp", *REFERENCE)])
def test_two_ranks_then_one(tmp_path: Path, embedded: Path, more: tuple[str, ...]) -> None:
    whole = runs.train(tmp_path / "whole", *STEPS, *more, "trainer.total_training_steps=4")
    run = runs.train_on_ranks(tmp_path / "run", 2, *STEPS, *more, "trainer.total_training_steps=2")
    job = runs.resume(run, "trainer.n_gpus_per_node=1", "trainer.total_training_steps=4")
    assert job.wait() == 0, job.output[-4000:]
    runs.assert_close(run, whole, rel=1e-3)
