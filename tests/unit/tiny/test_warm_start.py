from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlctl.batch import Prompts
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Sampling
from rlctl.tiny.embedded import EmbeddedTask, ensure_embedded


def sampled_accuracy(task: EmbeddedTask, num_prompts: int, n: int) -> float:
    rows = pq.read_table(task.train_file).to_pylist()[:num_prompts]
    texts = [row["prompt"][0]["content"] for row in rows]
    truths = tuple(row["reward_model"]["ground_truth"] for row in rows)
    tokenizer = AutoTokenizer.from_pretrained(task.model_dir)
    ids = tokenizer(texts, return_tensors="pt")["input_ids"]
    prompts = Prompts(ids, torch.ones_like(ids).bool(), torch.arange(len(ids)), truths, truths, tuple(texts))
    engine = HFRollout(AutoModelForCausalLM.from_pretrained(task.model_dir), tokenizer, "cpu")
    rollouts = engine.generate(prompts, Sampling(4), n=n, step_seed=1, num_groups_total=len(ids))
    right = [
        text == truth for text, truth in zip(rollouts.response_texts, rollouts.ground_truths, strict=True)
    ]
    return sum(right) / len(right)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_warm_start_stops_where_training_has_something_to_teach(seed: int, tmp_path: Path) -> None:
    """The accuracy it stops at was computed, not sampled: sample, and compare."""
    told: list[str] = []
    task = ensure_embedded(seed, tmp_path, lambda _, message: told.append(message))
    accuracy = sampled_accuracy(task, num_prompts=2048, n=2)
    assert 0.25 < accuracy < 0.38
    assert accuracy == pytest.approx(float(told[-1].rsplit(" ", 1)[1]), abs=0.04)
