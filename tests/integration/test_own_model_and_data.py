"""From published worked solutions to a trained model of the user."""

from __future__ import annotations

import json
from pathlib import Path

from rlctl.run_spec.load import load_spec
from tests import runs
from tests.own_model import save_tiny_qwen2

QUESTIONS = [
    (
        f"Tom has {a} apples and buys {b} more. How many has he?",
        f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}",
    )
    for a in range(3, 7)
    for b in range(4, 8)
]


def test_gsm8k_like_rows_to_a_trained_model(tmp_path: Path) -> None:
    raw = tmp_path / "sums.jsonl"
    raw.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in QUESTIONS))
    data = tmp_path / "data"
    job = runs.start(
        "prepare-data", "parquet", str(raw), "--out", str(data), "--val-size", "4", log=tmp_path / "l"
    )
    assert job.wait() == 0, job.output
    model = save_tiny_qwen2(tmp_path / "model", context=512)
    run = runs.train(
        tmp_path / "run",
        *("--model", str(model), "--data", str(data / "train.parquet"), "--reward", "maths"),
        *("-p", "rloo-seq-is"),
        f"data.val_files={data / 'test.parquet'}",
        "data.max_response_length=12",
        "data.train_batch_size=4",
        "engine.dtype=fp32",
        "actor.lr=1e-4",
        "trainer.total_training_steps=2",
        "trainer.test_freq=1",
    )
    spec = load_spec(files=[run / "spec.yaml"]).spec
    assert (spec.model.path, spec.reward.name) == (str(model), "maths")
    assert 64 <= spec.data.max_prompt_length < 512 - 12  # of the longest prompt
    assert "data.max_prompt_length=" in run.with_suffix(".log").read_text()
    lines = runs.metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "val/openai/gsm8k/reward_mean" in lines[0]
    for line in lines[1:]:
        assert line["reward/num_errors"] == 0
        assert line["reward/zero_spread_groups"] == 1.0  # a random model is always wrong
    truths = {row["ground_truth"] for row in runs.rollouts(run)}
    assert truths <= {str(a + b) for a in range(3, 7) for b in range(4, 8)}
    assert all("Tom has" in str(row["prompt"]) for row in runs.rollouts(run))
    assert "all grades are equal" in run.with_suffix(".log").read_text()
