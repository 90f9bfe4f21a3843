"""Runs with a teacher: in the loss and in the reward, with adapters, truncated sampling, on two ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlctl.metric_names import describe
from rlctl.tiny.embedded import ensure_embedded
from tests import runs

T = "algorithm.teacher."


@pytest.fixture(scope="module")
def teacher(whole_embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, surer of its answers."""
    where = tmp_path_factory.mktemp("teacher")
    source = ensure_embedded(1, whole_embedded_cache).model_dir
    model = AutoModelForCausalLM.from_pretrained(source)
    model.lm_head.weight.data *= 1.3
    model.save_pretrained(where)
    AutoTokenizer.from_pretrained(source).save_pretrained(where)
    return where


def metrics_of(run: Path) -> list[dict[str, float]]:
    lines = runs.metrics(run)
    for line in lines:
        for key in line.keys() - {"step", "timestamp"}:
            assert describe(key) is not None, key
            assert math.isfinite(line[key]), key
        assert line["rollout_corr/skipped_updates"] == 0
        assert {"distill/reverse_kl", "timing_s/teacher"} <= line.keys()
    return lines


def test_adapters_learn_from_the_teacher_alone(teacher: Path, tmp_path: Path, embedded: Path) -> None:
    """The task's rewards are still measured."""
    given = [f"{T}path={teacher}", f"{T}alone=true", f"{T}top_k=4", "model.lora_rank=4"]
    for line in metrics_of(runs.train(tmp_path / "run", *given, "trainer.total_training_steps=2")):
        assert line["actor/pg_loss"] == 0.0 == line["critic/rewards/mean"]
        assert line["critic/score/mean"] > 0.0
        assert line["actor/grad_norm"] > 0.0
        assert line["distill/kl_loss"] > 0.0
        assert 0.0 < line["distill/tail_mass"] < 1.0


#: Where the KL is, and what else is special about the run.
FORMS = {
    "loss, exact sampling, zero 3": (
        f"{T}top_k=3",
        "rollout.top_p=0.95",
        "rollout.exact_sampling=true",
        "rollout.staleness=1",
        "engine.zero_stage=3",
    ),
    "reward, decoupled": (
        f"{T}kl_in=reward",
        "algorithm.rollout_correction.bypass_mode=false",
        "actor.use_kl_loss=true",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_two_ranks_are_one_run(form: str, teacher: Path, tmp_path: Path, embedded: Path) -> None:
    given = [f"{T}path={teacher}", *FORMS[form], "trainer.total_training_steps=3"]
    one = runs.train(tmp_path / "one", *given)
    two = runs.train_on_ranks(tmp_path / "two", 2, *given)
    runs.assert_close(two, one, rel=1e-3)
    listed = {"distill/kl_loss", "distill/tail_mass"}
    assert listed & metrics_of(one)[0].keys() == (listed if "loss" in form else set())


def test_another_teacher_is_not_resumed_with(teacher: Path, tmp_path: Path, embedded: Path) -> None:
    """Its files count among the inputs of the run, under an absolute path."""
    given = [f"{T}path={teacher}", "trainer.save_freq=1", "trainer.total_training_steps=1"]
    run = runs.train(tmp_path / "run", *given)
    config = teacher / "generation_config.json"
    before = config.read_text()
    config.write_text(before + "\n")
    job = runs.resume(run, "trainer.total_training_steps=2")
    code = job.wait()
    config.write_text(before)
    assert code != 0
    assert "algorithm.teacher.path: generation_config.json" in job.output
