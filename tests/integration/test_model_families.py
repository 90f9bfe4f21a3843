"""Every family that has a preset: its architecture trains with adapters, and its size is as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from rlctl.prefix import body_of
from rlctl.run_spec.model import ModelSpec
from rlctl.run_spec.model_size import PUBLISHED, model_size
from rlctl.run_spec.sources import all_presets, read_yaml_file
from rlctl.tiny.embedded import problem, write_parquet
from tests import runs
from tests.models import config_of
from tests.own_model import save_tiny
from tests.processes import Job

TIED = {"tie_word_embeddings": True}
#: Of the 4B, 12B and 27B.
GEMMA3_VISION = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
QWEN3 = {"num_key_value_heads": 1, "head_dim": 8}
GEMMA3 = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 64} | TIED
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
    "gemma3-1b": (Gemma3TextConfig, GEMMA3),
    "gemma3-4b": (Gemma3Config, GEMMA3),  # with a vision tower
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
    "gemma3-4b",
    "smollm2-135m",
    "llama3-8b",
)
#: Mixtures of experts, whose experts are replayed; they have no preset.
MIXTURES: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3-moe": (
        Qwen3MoeConfig,
        QWEN3 | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    ),
    "mixtral": (
        MixtralConfig,
        {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: The run that trains all weights.
IN_FULL = "in-full"
SUFFIXES = tuple(f".{name}.weight" for name in ADAPTED)


def _train_all(directory: str) -> int:
    """One step of every family, one after the other in one process, which keeps its process group."""
    from rlctl.cli.app import run
    from rlctl.engine import ranks

    ranks.leave_ranks = lambda: None
    there = Path(directory)

    def train(family: str, algorithm: str, name: str, *more: str, preset: str | None = None) -> int:
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
            f"trainer.run_dir={there / 'runs' / name}",
        ]
        presets = ["-p", preset or family, "-p", "1gpu-lora", "-p", algorithm]
        return run(["train", *presets, *overrides, *more])

    for family in TRAINED:
        if code := train(family, "rloo-seq-is", family):
            return code
    # All weights and a critic, where text does not reach all weights.
    if code := train("gemma3-4b", "ppo-seq-is-token-rs", IN_FULL, "model.lora_rank=0", "engine.dtype=fp32"):
        return code
    for mixture in MIXTURES:
        given = ("model.lora_rank=0", "engine.dtype=fp32", "actor.routing_replay=true", "rollout.dtype=fp32")
        if code := train(mixture, "rloo-seq-is", mixture, *given, preset="qwen3-4b"):
            return code
    data, out = str(there / "train.parquet"), str(there / "evaluation")
    limits = ["--n", "1", "--limit", "2", "--max-response-length", "4"]
    return run(
        ["evaluate", str(there / "runs" / IN_FULL), "--data", data, *limits, "--engine", "hf", "--out", out]
    )


def test_every_family_has_its_architecture_here() -> None:
    assert set(FAMILIES) == {
        name for name, preset in all_presets().items() if preset.kind == "models" and name != "embedded"
    }


def test_each_architecture_trains_one_step_with_adapters_on_every_layer(tmp_path: Path) -> None:
    write_parquet([problem(12, number) for number in range(10, 18)], "train", tmp_path / "train.parquet")
    assert {FAMILIES[family][0] for family in TRAINED} == {config for config, _ in FAMILIES.values()}
    for family in (*TRAINED, *MIXTURES):
        config_class, shape = (FAMILIES | MIXTURES)[family]
        save_tiny(tmp_path / family, config_class, **shape)
    (tmp_path / "gemma3-4b" / "preprocessor_config.json").write_text("{}")
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
        assert changed == {name for name in before if name.endswith(SUFFIXES) and "vision" not in name}
        assert len(changed) == 2 * len(SUFFIXES)
    _check_in_full(tmp_path)
    for name in (IN_FULL, *MIXTURES):  # in float32, before any update
        (line,) = runs.metrics(tmp_path / "runs" / name)
        assert line["rollout_corr/k3_kl"] < 1e-9
        assert line["training/staleness_max"] == 0
        assert line.get("actor/live_routed_tokens") == (None if name == IN_FULL else 0)


def _check_in_full(directory: Path) -> None:
    """All weights of the text decoder are trained and nothing else; the checkpoint is a whole model."""
    checkpoint = directory / "runs" / IN_FULL / "checkpoints" / "step_000001"
    before = load_file(directory / "gemma3-4b" / "model.safetensors")
    after = load_file(checkpoint / "model" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("language_model.")}
    assert (checkpoint / "model" / "preprocessor_config.json").read_text() == "{}"
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    found = model.state_dict()["model.vision_tower.embeddings.patch_embedding.weight"]
    assert torch.equal(found, before["vision_tower.embeddings.patch_embedding.weight"])


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_published_size_is_that_of_the_architecture(family: str, monkeypatch, tmp_path: Path) -> None:
    for cache in ("HF_HUB_CACHE", "RLCTL_CACHE"):  # without the model itself
        monkeypatch.setenv(cache, str(tmp_path))
    path = read_yaml_file(all_presets()[family].path, ("model.path",)).leaves["model.path"].value
    size = model_size(ModelSpec(path=str(path)))
    published = PUBLISHED[str(path)]
    assert size == published
    config_class, options = FAMILIES[family]
    tied = options.get("tie_word_embeddings", False)
    if config_class is Gemma3Config:
        text = config_of("gemma3_text", published.shape, tie_word_embeddings=tied)
        config = Gemma3Config(text_config=text, vision_config=GEMMA3_VISION)
    else:
        config = config_of(config_class.model_type, published.shape, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == published.num_parameters
    if of_text := published.num_read_by_text:
        assert sum(parameter.numel() for parameter in body_of(model).parameters()) == of_text
        assert size.num_trainable == of_text


def test_the_size_of_a_local_model_with_images_says_what_text_reaches(tmp_path: Path) -> None:
    # As published: what is the default of its class is left out.
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "text_config": text, "vision_config": GEMMA3_VISION}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = model_size(ModelSpec(path=str(tmp_path)))
    published = PUBLISHED["google/gemma-3-4b-it"]
    assert size.shape == published.shape
    assert size.num_parameters == pytest.approx(published.num_parameters, rel=0.01)
    assert size.num_trainable == pytest.approx(published.num_trainable, rel=0.01)
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "tiny", Gemma3Config, **GEMMA3))
    size = model_size(ModelSpec(path=str(tmp_path / "tiny")))
    assert size.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.num_trainable == sum(parameter.numel() for parameter in body_of(model).parameters())
