"""Sampling ahead while the trainer trains: stopped and resumed, no batch is lost, repeated or too old."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import runs

pytestmark = pytest.mark.usefixtures("embedded")

AHEAD, STEPS = 2, 14
ASYNCHRONOUS = (
    "--preset",
    "rloo-seq-is",
    f"rollout.max_staleness={AHEAD}",
    f"trainer.total_training_steps={STEPS}",
)
UPDATES_PER_STEP = 2


def prompts_by_step(run_dir: Path) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for row in runs.rollouts(run_dir):
        found.setdefault(row["step"], []).append(row["prompt"])
    return {step: sorted(prompts) for step, prompts in sorted(found.items())}


def test_stopped_and_resumed_it_trains_on_every_batch_once(tmp_path: Path) -> None:
    job = runs.start_train(tmp_path / "run", *ASYNCHRONOUS)
    job.wait_for(lambda: len(runs.metrics(tmp_path / "run")) >= 4)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143, job.output[-3000:]
    assert job.orphans() == []
    stopped_at = len(runs.metrics(tmp_path / "run"))
    assert stopped_at < STEPS
    again = runs.resume(tmp_path / "run")
    assert again.wait() == 0, again.output[-3000:]

    lines = runs.metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    oldest = [line["training/staleness_max"] for line in lines]
    assert max(oldest) <= AHEAD * UPDATES_PER_STEP
    assert max(oldest) > 0  # some batch was sampled ahead
    # The same prompts at the same steps as a run that samples when it trains.
    plain = runs.train(tmp_path / "plain", *ASYNCHRONOUS[:2], f"trainer.total_training_steps={STEPS}")
    assert prompts_by_step(tmp_path / "run") == prompts_by_step(plain)
