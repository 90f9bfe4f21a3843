"""Guardrails in whole runs of the embedded model, from the command line."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
from safetensors.torch import load_file

from rlctl.diagnose.thresholds import WINDOW
from tests import hooks, runs

pytestmark = pytest.mark.usefixtures("whole_embedded")
SEQ = ("-p", "rloo-seq-is")
ACT, WARN = "trainer.guardrails.mode=act", "trainer.guardrails.mode=warn"
#: Adam's first steps are full-size: at this rate they carry the policy away from its samples.
WILD = ("actor.lr=5e-3", "trainer.total_training_steps=6", "trainer.save_freq=2")


def column(run: Path, name: str) -> list[float]:
    return [line[f"guardrails/{name}"] for line in runs.metrics(run)]


@pytest.fixture(scope="module")
def wild(whole_embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps at far too high a rate, under guardrails."""
    where = tmp_path_factory.mktemp("wild") / "run"
    return runs.train(where, *SEQ, *WILD, ACT, env={"RLCTL_CACHE": str(whole_embedded_cache)})


def test_what_was_done_is_logged_and_summed_up(wild: Path) -> None:
    summary = json.loads((wild / "summary.json").read_text())["guardrails"]
    for name in ("alarms", "interventions", "skipped"):
        assert summary[name] == sum(column(wild, name)) > 0, name
    assert summary["stopped_because"] is None
    assert min(column(wild, "lr_scale")) < 1.0
    said = wild.with_suffix(".log").read_text()
    assert said.count("guardrails: step") == 2  # each kind once: effective samples, and drift
    assert f"Guardrails: {summary['alarms']} alarms" in said
    rates = [line["actor/lr"] for line in runs.metrics(wild)]
    assert min(rates) < 5e-3


def test_a_resumed_run_goes_on_as_the_whole_one(tmp_path: Path, wild: Path) -> None:
    run = tmp_path / "run"
    job = runs.start_train(run, *SEQ, *WILD, ACT, before=partial(hooks.kill_after_logging, 5))
    assert job.wait() == -signal.SIGKILL, job.output[-4000:]
    finished = runs.resume(run)
    assert finished.wait() == 0, finished.output[-4000:]
    assert runs.reproducible(run) == runs.reproducible(wild)
    weights = "checkpoints/step_000006/model/model.safetensors"
    assert (run / weights).read_bytes() == (wild / weights).read_bytes()


def test_warning_and_off_train_alike(tmp_path: Path) -> None:
    warned = runs.train(tmp_path / "warn", *SEQ, *WILD, WARN)
    off = runs.train(tmp_path / "off", *SEQ, *WILD, "trainer.guardrails.mode=off")
    assert sum(column(warned, "alarms")) > 0
    assert sum(column(warned, "interventions")) == 0
    assert "mode=act would have" in warned.with_suffix(".log").read_text()
    bare = [
        {key: value for key, value in line.items() if not key.startswith("guardrails/")}
        for line in runs.reproducible(warned)
    ]
    assert bare == runs.reproducible(off)
    assert json.loads((off / "summary.json").read_text())["guardrails"] == {}


def test_a_run_that_cannot_be_saved_ends_with_a_checkpoint(tmp_path: Path, whole_embedded: Path) -> None:
    """Log-probs that are wrong from the start: no update is made, and no weight has moved at the end."""
    run = tmp_path / "run"
    job = runs.start_train(run, *SEQ, ACT, "trainer.total_training_steps=30", before=hooks.far_rollouts)
    assert job.wait() == 3, job.output[-4000:]
    assert len(runs.metrics(run)) == WINDOW
    assert sum(column(run, "skipped")) == 2 * WINDOW
    assert "Guardrails stopped the run: no update was made" in job.output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["guardrails"]["stopped_because"].startswith("no update was made")
    assert summary["interrupted"]
    trained = load_file(run / summary["model"] / "model.safetensors")
    [start] = whole_embedded.rglob("model.safetensors")
    for name, weight in load_file(start).items():
        assert trained[name].equal(weight), name

    on = runs.resume(run, "trainer.guardrails.on_collapse=warn", f"trainer.total_training_steps={WINDOW + 2}")
    assert on.wait() == 0, on.output[-4000:]
    assert len(runs.metrics(run)) == WINDOW + 2
    assert sum(column(run, "skipped")) == 2 * WINDOW  # the log-probs are right again


#: Four updates per batch at a constant rate, no warm-up.
COLLAPSING = (
    "data.train_batch_size=64",
    "actor.ppo_mini_batch_size=16",
    "actor.ppo_micro_batch_size_per_gpu=512",
    "rollout.n=8",
    "actor.lr=2e-3",
    "trainer.total_training_steps=20",
    "trainer.rollouts_per_step=0",
)


@pytest.mark.slow
def test_a_run_that_collapses_without_survives_with(tmp_path: Path) -> None:
    rewards = {}
    for mode in (WARN, ACT):
        run = runs.train(tmp_path / mode[-4:].strip("="), *SEQ, *COLLAPSING, mode)
        rewards[mode] = [line["critic/score/mean"] for line in runs.metrics(run)]
    assert rewards[WARN][0] == rewards[ACT][0] > 0.2
    assert fmean(rewards[WARN][-5:]) < 0.1
    assert fmean(rewards[ACT][-5:]) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "batches"),
    # PPO makes many updates per batch: fewer batches, but enough for one evaluation of all rules.
    [("rloo-seq-is", 25), ("grpo-token-is-multi-rs", 25), ("ppo-seq-is-token-rs", 15)],
)
def test_a_healthy_run_is_left_alone(tmp_path: Path, preset: str, batches: int) -> None:
    """The embedded scale as it ships."""
    run = tmp_path / "run"
    arguments = ("trainer.total_training_steps=160", "trainer.rollouts_per_step=0", ACT)
    job = runs.start("train", "-p", preset, f"trainer.run_dir={run}", *arguments, log=tmp_path / "log")
    job.wait_for(lambda: len(runs.metrics(run)) >= batches)
    job.signal(signal.SIGINT)
    assert job.wait() == 130, job.output[-4000:]
    assert sum(column(run, "alarms")) == 0
    assert sum(column(run, "interventions")) == 0
    assert "guardrails:" not in job.output
