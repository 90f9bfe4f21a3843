"""`rlctl train` on the embedded model, from the command line to the last file."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlctl.metric_names import SECTIONS, describe
from rlctl.run_spec.load import load_spec
from rlctl.track.open_run import log_ratios
from tests import runs
from tests.processes import Job

pytestmark = pytest.mark.usefixtures("embedded")
SEQ = ("-p", "rloo-seq-is")
STEPS = "trainer.total_training_steps=4"


@pytest.fixture(scope="module")
def run_dir(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of rloo-seq-is on one rank."""
    where = tmp_path_factory.mktemp("whole") / "run"
    return runs.train(where, *SEQ, STEPS, "trainer.save_freq=2", env={"RLCTL_CACHE": str(embedded_cache)})


def test_run_directory_is_complete(run_dir: Path) -> None:
    spec = load_spec([], [run_dir / "spec.yaml"], []).spec
    assert spec.trainer.total_training_steps == 4
    assert spec.trainer.run_dir == str(run_dir)
    environment = json.loads((run_dir / "environment.json").read_text())
    assert environment["packages"]["torch"] == version("torch")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["step"], summary["interrupted"], summary["num_updates"]) == (4, False, 8)
    assert (run_dir / summary["model"] / "config.json").is_file()
    assert (run_dir / summary["checkpoint"] / "manifest.json").is_file()
    assert runs.checkpoints(run_dir) == ["step_000002", "step_000004"]


def test_every_metric_has_a_definition_and_a_finite_value(run_dir: Path) -> None:
    lines = runs.metrics(run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert {metric.name for metric in SECTIONS["Lengths"]} <= line.keys()
        for key, value in line.items():
            if key not in {"step", "timestamp"}:
                assert describe(key) is not None, key
                assert isinstance(value, float | int), (key, value)
                assert math.isfinite(value), key
        assert line["rollout_corr/rollout_is_batch_norm_factor"] > 0
        assert line["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-6)
    assert lines[-1]["rollout_corr/k3_kl"] > 1e-7  # the second mini-batch is off-policy
    assert lines[0]["perf/total_num_tokens"] == 32 * (
        lines[0]["response_length/mean"] + lines[0]["prompt_length/mean"]
    )


def test_rollout_and_trainer_agree_before_the_first_update(run_dir: Path) -> None:
    rows = runs.rollouts(run_dir)
    assert len(rows) == 4 * 32
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    for row in rows:
        length = len(row["token_ids"])
        assert length == len(row["rollout_log_probs"]) == len(row["rollout_is_weights"])
        if row["group_id"] < 4:  # the first of two mini-batches
            assert max(map(abs, log_ratios(row))) < 1e-4
    assert max(abs(gap) for row in rows if row["group_id"] >= 4 for gap in log_ratios(row)) > 1e-3
    assert {row["policy_version"] for row in rows} == {0, 2, 4, 6}
    by_step = {line["step"]: line["critic/score/mean"] for line in runs.metrics(run_dir)}
    for step, mean in by_step.items():
        rewards = [row["reward"] for row in rows if row["step"] == step]
        assert sum(rewards) / len(rewards) == pytest.approx(mean)
        assert all(row["reward"] == float(row["response"] == row["ground_truth"]) for row in rows)


def test_checkpoint_is_the_trained_model(run_dir: Path, embedded_cache: Path) -> None:
    """The exported model gives the log-probs that the next step's rollouts would be sampled with."""
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints/step_000004/model")
    AutoTokenizer.from_pretrained(run_dir / "checkpoints/step_000004/model")
    start = AutoModelForCausalLM.from_pretrained(next(embedded_cache.glob("embedded/*/model")))
    moved = [
        float((a - b).abs().max())
        for a, b in zip(model.state_dict().values(), start.state_dict().values(), strict=True)
    ]
    assert max(moved) > 1e-3
    row = next(r for r in runs.rollouts(run_dir) if r["step"] == 3 and r["group_id"] == 0)
    after_two = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints/step_000002/model")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "checkpoints/step_000002/model")
    ids, start = torch.tensor(row["token_ids"]), row["sampled"].index(True)
    assert ids[:start].tolist() == tokenizer(row["prompt"])["input_ids"]
    with torch.no_grad():
        log_probs = after_two(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
    got = log_probs.gather(-1, ids[start:, None]).squeeze(-1)
    torch.testing.assert_close(got, torch.tensor(row["rollout_log_probs"][start:]), rtol=0, atol=1e-4)


def test_same_seed_same_run(run_dir: Path, tmp_path: Path) -> None:
    again = runs.train(tmp_path / "run", *SEQ, STEPS)
    assert runs.reproducible(again) == runs.reproducible(run_dir)
    assert runs.rollouts(again) == runs.rollouts(run_dir)


def test_micro_batch_size_changes_nothing(run_dir: Path, tmp_path: Path) -> None:
    cut = runs.train(tmp_path / "run", *SEQ, STEPS, "actor.ppo_micro_batch_size_per_gpu=3")
    runs.assert_close(cut, run_dir)


def test_generating_in_parts_changes_nothing(run_dir: Path, tmp_path: Path) -> None:
    parts = runs.train(tmp_path / "run", *SEQ, STEPS, "rollout.max_num_seqs=5")
    runs.assert_close(parts, run_dir)


def test_two_ranks_are_one_run(run_dir: Path, tmp_path: Path) -> None:
    """Started by ourselves, through torch's elastic agent."""
    two = runs.train(tmp_path / "run", *SEQ, STEPS, "trainer.n_gpus_per_node=2")
    runs.assert_close(two, run_dir)
    assert len(runs.rollouts(two)) == 4 * 32


@pytest.mark.parametrize(("stage", "count"), [(1, 1), (2, 2), (3, 2)])
def test_zero_stages_are_one_run(run_dir: Path, tmp_path: Path, stage: int, count: int) -> None:
    """Started as torchrun does."""
    cut = runs.train_on_ranks(tmp_path / "run", count, *SEQ, STEPS, f"engine.zero_stage={stage}")
    runs.assert_close(cut, run_dir)
    AutoModelForCausalLM.from_pretrained(cut / "checkpoints/step_000004/model")


def test_bf16_runs(tmp_path: Path) -> None:
    lines = runs.metrics(
        runs.train(tmp_path / "run", *SEQ, STEPS, "engine.dtype=bf16", "engine.zero_stage=2")
    )
    assert len(lines) == 4
    assert lines[0]["training/rollout_probs_diff_mean"] < 0.05  # of several mini-batches


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("grpo-token-is-multi-rs", ()),
        ("ppo-seq-is-token-rs", ()),
        ("rloo-seq-is", ("algorithm.rollout_correction.bypass_mode=false", "actor.ppo_epochs=2")),
    ],
)
def test_presets_train(tmp_path: Path, preset: str, overrides: tuple[str, ...]) -> None:
    """With a sampler that samples; the golden runs have every preset."""
    run = runs.train(tmp_path / "run", "-p", preset, "trainer.total_training_steps=2", *overrides)
    lines = runs.metrics(run)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["actor/grad_norm"] > 0
        assert line["rollout_corr/skipped_updates"] == 0
        assert all(describe(key) for key in line.keys() - {"step", "timestamp"})
    epochs = load_spec([preset], [], list(overrides)).spec.actor.ppo_epochs
    assert json.loads((run / "summary.json").read_text())["num_updates"] == 2 * 2 * epochs


def test_loggers(tmp_path: Path) -> None:
    run = runs.train(
        tmp_path / "run",
        *SEQ,
        "trainer.total_training_steps=2",
        "trainer.logger=[console,wandb,tensorboard]",
        env={"WANDB_MODE": "offline"},
    )
    assert list((run / "tensorboard").glob("events.*"))
    assert list(run.rglob("offline-run-*"))
    assert len(runs.metrics(run)) == 2


def test_validation_at_start_and_end(tmp_path: Path) -> None:
    run = runs.train(tmp_path / "run", *SEQ, "trainer.total_training_steps=3", "trainer.test_freq=2")
    key = "val/embedded/addition/reward_mean"
    validated = {line["step"]: line[key] for line in runs.metrics(run) if key in line}
    assert list(validated) == [0, 2, 3]
    assert all(0 < value < 1 for value in validated.values())


def test_prompts_of_every_epoch_once(tmp_path: Path, embedded_cache: Path) -> None:
    import pyarrow.parquet as pq

    few = tmp_path / "few.parquet"
    table = pq.read_table(next(embedded_cache.glob("embedded/*/train.parquet")))
    pq.write_table(table.slice(0, 24), few)
    run = runs.train(tmp_path / "run", *SEQ, "trainer.total_training_steps=6", f"data.train_files={few}")
    asked: dict[int, list[str]] = {}
    for row in runs.rollouts(run):
        asked.setdefault(int(row["step"]), []).append(str(row["prompt"]))
    for first in (1, 4):
        epoch = [prompt for step in range(first, first + 3) for prompt in asked[step][::4]]
        assert len(set(epoch)) == 24
    assert [line["training/epoch"] for line in runs.metrics(run)] == [0, 0, 0, 1, 1, 1]
    assert asked[1] != asked[4]


def test_torchrun_starts_it(run_dir: Path, tmp_path: Path, forked_commands: Path) -> None:
    env = {"PYTHON_EXEC": str(forked_commands / "python")}
    job = Job(_torchrun, str(tmp_path / "run"), log=tmp_path / "log", env=env)
    assert job.wait() == 0, job.output[-4000:]
    runs.assert_close(tmp_path / "run", run_dir)


def _torchrun(run_dir: str) -> int:
    from torch.distributed.run import main

    command = ["-m", "rlctl", "train", *SEQ, STEPS, *runs.SMALL]
    where = (f"trainer.run_dir={run_dir}", "trainer.n_gpus_per_node=2")
    main(["--standalone", "--nproc-per-node=2", *command, *where])
    return 0


@pytest.mark.slow
def test_it_learns(whole_embedded: Path, tmp_path: Path) -> None:
    """Half a minute: addition from a third right to seven eighths in half of the preset's steps."""
    job = runs.start(
        "train",
        *SEQ,
        "trainer.total_training_steps=80",
        f"trainer.run_dir={tmp_path / 'run'}",
        log=tmp_path / "log",
    )
    assert job.wait(500) == 0, job.output[-4000:]
    rewards = [line["critic/score/mean"] for line in runs.metrics(tmp_path / "run")]
    assert sum(rewards[:5]) / 5 < 0.4
    assert sum(rewards[-5:]) / 5 >= 0.85
