"""A real language model by its name: trained with adapters, evaluated, exported, loaded as a plain model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import sums
from rlctl.data.schema import write_rows
from rlctl.errors import EnvironmentFailure
from rlctl.model_files import model_directory
from tests import runs

pytestmark = [pytest.mark.llm, pytest.mark.slow]
NAME = "smollm2-135m"
TIMEOUT_S = 500.0
ADAPTED = ("q_proj", "v_proj")


@pytest.fixture(scope="module")
def model_dir() -> Path:
    try:
        return Path(model_directory(NAME))
    except EnvironmentFailure as error:
        pytest.skip(f"no real language model here: {error.what}")


@pytest.fixture(scope="module")
def run_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the shipped run, smaller and with adapters."""
    out = tmp_path_factory.mktemp("llm")
    for name, pairs in zip(("train", "held_out"), sums.split(), strict=True):
        write_rows(out / f"{name}.parquet", name, sums.rows(pairs))
    job = runs.start(
        "train",
        "-p",
        "smollm2-135m-sums",
        f"data.train_files={out / 'train.parquet'}",
        "data.train_batch_size=2",
        "data.max_response_length=6",
        "rollout.n=4",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "actor.entropy_coeff=0.01",  # all of a small group may be wrong: without it there is no gradient
        "engine.dtype=fp32",
        "actor.lr=1e-4",
        "model.lora_rank=4",
        f"model.target_modules=[{','.join(ADAPTED)}]",
        "trainer.total_training_steps=2",
        f"trainer.run_dir={out / 'run'}",
        log=out / "train.log",
    )
    assert job.wait(TIMEOUT_S) == 0, job.output[-4000:]
    return out / "run"


def test_the_two_sides_of_a_split_share_no_sum() -> None:
    train, held_out = sums.split()
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in held_out}
    assert all(sum(pair) <= sums.HIGHEST for pair in train + held_out)


def test_what_the_name_stands_for(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49_152)
    assert "quantization_config" not in config
    text = AutoTokenizer.from_pretrained(model_dir).apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_two_steps_train_the_adapters_on_policy(run_dir: Path) -> None:
    lines = runs.metrics(run_dir)
    assert len(lines) == 2
    for line in lines:
        assert line["actor/grad_norm"] > 0
        assert abs(line["rollout_corr/kl"]) < 1e-4  # trainer and sampling copy agree in fp32
        assert line["rollout_corr/rollout_is_raw_eff_sample_size"] > 0.999


def test_the_run_is_evaluated(run_dir: Path) -> None:
    out = run_dir.parent / "evaluated"
    data = run_dir.parent / "held_out.parquet"
    job = runs.start(
        *("evaluate", str(run_dir), "--data", str(data), "--limit", "2", "--n", "2", "--k", "1,2"),
        *("--max-response-length", "4", "--out", str(out)),
        log=run_dir.parent / "evaluate.log",
    )
    assert job.wait(TIMEOUT_S) == 0, job.output[-4000:]
    assert (out / "results.json").is_file()


def test_the_export_is_a_plain_model_with_the_adapters_in_it(run_dir: Path, model_dir: Path) -> None:
    out = run_dir.parent / "exported"
    job = runs.start("export", str(run_dir), "--out", str(out), log=run_dir.parent / "export.log")
    assert job.wait(TIMEOUT_S) == 0, job.output[-4000:]
    before, after = load_file(model_dir / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if any(f".{adapted}." in name for adapted in ADAPTED)}
    model = AutoModelForCausalLM.from_pretrained(out)
    prompt = AutoTokenizer.from_pretrained(out)("What is 7 + 5?", return_tensors="pt")
    assert model(**prompt).logits.isfinite().all()
