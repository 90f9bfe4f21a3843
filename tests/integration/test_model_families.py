"""Every family that has a preset: its architecture trains with adapters, and its size is as published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from rlctl.spec.model import ModelSpec
from rlctl.spec.model_size import PUBLISHED, model_size
from rlctl.spec.presets import all_presets
from rlctl.spec.yaml_source import read_yaml_file
from rlctl.tiny.task import problem, write_parquet
from tests import runs
from tests.models import config_of
from tests.own_model import save_tiny
from tests.processes import Job

TIED = {"tie_word_embeddings": True}
QWEN3 = {"num_key_value_heads": 1, "head_dim": 8}
#: Preset → architecture, and what of its shape is its own: grouped attention, head size, tied embeddings.
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen2.5-7b": (Qwen2Config, {"num_key_value_heads": 1}),
    "qwen2-7b": (Qwen2Config, {"num_key_value_heads": 1}),
    "llama3-8b": (LlamaConfig, {"num_key_value_heads": 1}),
    "mistral-7b": (MistralConfig, {"num_key_value_heads": 1}),
    "gemma-7b": (GemmaConfig, {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
    "deepseek-7b": (LlamaConfig, {"num_key_value_heads": 2}),
    **dict.fromkeys(("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"), (Qwen3Config, QWEN3 | TIED)),
    "qwen3-8b": (Qwen3Config, QWEN3),
    **dict.fromkeys(
        ("llama3.2-1b", "llama3.2-3b", "smollm2-135m"), (LlamaConfig, {"num_key_value_heads": 1} | TIED)
    ),
    "smollm2-1.7b": (LlamaConfig, {"num_key_value_heads": 2} | TIED),
    "smollm3-3b": (
        SmolLM3Config,
        {"num_key_value_heads": 1, "no_rope_layers": [1, 0], "pad_token_id": 0} | TIED,
    ),
    "gemma3-1b": (Gemma3TextConfig, {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 64} | TIED),
    **dict.fromkeys(
        ("deepseek-r1-qwen-1.5b", "deepseek-r1-qwen-7b"), (Qwen2Config, {"num_key_value_heads": 1})
    ),
}
#: One of each architecture: what the others differ in is their size.
TRAINED = (
    "qwen2-7b",
    "mistral-7b",
    "gemma-7b",
    "qwen3-4b",
    "smollm3-3b",
    "gemma3-1b",
    "smollm2-135m",
    "llama3-8b",
)
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SUFFIXES = tuple(f".{name}.weight" for name in ADAPTED)


def _train_all(directory: str) -> int:
    """One step of every family, one after the other in one process, which keeps its process group."""
    from rlctl.cli.app import run
    from rlctl.engine import ranks

    ranks.leave_ranks = lambda: None
    there = Path(directory)
    for family in TRAINED:
        overrides = [
            f"model.path={there / family}",
            f"data.train_files={there / 'train.parquet'}",
            "data.train_batch_size=4",
            "data.max_prompt_length=80",
            "data.max_response_length=6",
            "model.enable_gradient_checkpointing=true",  # as the other machines' presets have it
            "rollout.name=hf",
            "rollout.n=2",
            "actor.ppo_max_token_len_per_gpu=200",
            "actor.lr=1e-2",
            "actor.entropy_coeff=0.1",  # a random model is always wrong: without it there is no gradient
            "trainer.total_training_steps=1",
            f"trainer.run_dir={there / 'runs' / family}",
        ]
        if code := run(["train", "-p", family, "-p", "1gpu-lora", "-p", "rloo-seq-is", *overrides]):
            return code
    return 0


def test_every_family_has_its_architecture_here() -> None:
    assert set(FAMILIES) == {
        name for name, preset in all_presets().items() if preset.kind == "models" and name != "embedded"
    }


def test_each_architecture_trains_one_step_with_adapters_on_every_layer(tmp_path: Path) -> None:
    write_parquet([problem(12, number) for number in range(10, 18)], "train", tmp_path / "train.parquet")
    assert {FAMILIES[family][0] for family in TRAINED} == {config for config, _ in FAMILIES.values()}
    for family in TRAINED:
        config_class, shape = FAMILIES[family]
        save_tiny(tmp_path / family, config_class, **shape)
    job = Job(_train_all, str(tmp_path), log=tmp_path / "log")
    assert job.wait() == 0, job.output[-4000:]
    for family in TRAINED:
        run = tmp_path / "runs" / family
        (line,) = runs.metrics(run)
        assert line["actor/grad_norm"] > 0
        before = load_file(tmp_path / family / "model.safetensors")
        after = load_file(run / "checkpoints" / "step_000001" / "model" / "model.safetensors")
        assert before.keys() == after.keys()
        changed = {
            name for name in before if not torch.equal(before[name].to(after[name].dtype), after[name])
        }
        assert changed == {name for name in before if name.endswith(SUFFIXES)}
        assert len(changed) == 2 * len(SUFFIXES)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_published_size_is_that_of_the_architecture(family: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    path = read_yaml_file(all_presets()[family].path, ("model.path",)).leaves["model.path"].value
    size = model_size(ModelSpec(path=str(path)))
    num_parameters, shape = PUBLISHED[str(path)]
    assert (size.num_parameters, size.shape) == (num_parameters, shape)
    config_class, options = FAMILIES[family]
    tied = options.get("tie_word_embeddings", False)
    config = config_of(config_class.model_type, shape, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
