from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlctl.batch import Task
from rlctl.environment.single_turn import sample_episodes
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Sampling
from rlctl.tiny.embedded import EmbeddedTask, ensure_embedded


def sampled_accuracy(task: EmbeddedTask, num_prompts: int, n: int) -> float:
    rows = pq.read_table(task.train_file).to_pylist()[:num_prompts]
    texts = [row["prompt"][0]["content"] for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(task.model_dir)
    tasks = [
        Task(ids, "", place, ground_truth=rows[place]["reward_model"]["ground_truth"])
        for place, ids in enumerate(tokenizer(texts)["input_ids"])
    ]
    engine = HFRollout(AutoModelForCausalLM.from_pretrained(task.model_dir), tokenizer, "cpu")
    episodes = sample_episodes(engine, tasks, n, Sampling(4), 1, tokenizer)
    return sum(episode.response == episode.task.ground_truth for episode in episodes) / len(episodes)


def check_accuracy(task: EmbeddedTask, told: str) -> None:
    """The accuracy that training starts at was computed, not sampled: sample, and compare."""
    accuracy = sampled_accuracy(task, num_prompts=2048, n=2)
    assert 0.25 < accuracy < 0.38
    assert accuracy == pytest.approx(float(told.rsplit(" ", 1)[1]), abs=0.04)


@pytest.mark.slow
def test_warm_start_stops_where_training_has_something_to_teach(tmp_path: Path) -> None:
    told: list[str] = []
    task = ensure_embedded(2, tmp_path, told.append)
    check_accuracy(task, told[-1])


@pytest.mark.slow
def test_the_model_of_the_other_tests_does_too(whole_embedded_cache: Path) -> None:
    check_accuracy(ensure_embedded(1, whole_embedded_cache), (whole_embedded_cache / "built").read_text())
