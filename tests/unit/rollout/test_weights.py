"""Engines get weights by the names and in the parts of the model's files, however transformers holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.engine.policy_engine import plain_weights
from rlctl.errors import RunFailure
from rlctl.rollout.expected_weights import ExpectedWeights
from tests.models import tiny_model

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
}
MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
    # The bias of its router is a buffer, which its files contain.
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 8, "head_dim": 8}
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}


def mixture(family: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **MIXTURES[family]))
    for _, buffer in model.named_buffers():
        buffer.normal_()
    return model


def saved(model, where: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(where)
    return load_file(where / "model.safetensors")


def in_files(model) -> dict[str, torch.Tensor]:
    weights = ((weight.name, weight.value()) for weight in plain_weights(model))
    return {
        name: part.detach().clone()
        for names, part in ExpectedWeights(model).in_files(weights)
        for name in names
    }


@pytest.mark.parametrize("is_read", [True, False], ids=["read from files", "made from a config"])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_of_experts(family: str, is_read: bool, tmp_path: Path) -> None:
    model = mixture(family)
    files = saved(model, tmp_path)
    assert any(".experts.3." in name for name in files)
    if is_read:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = in_files(model)
    assert found.keys() == files.keys()
    for name, tensor in files.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_tied_weights(kind: str, has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in files on a GPU, and where vLLM's model has no head (Gemma 2).

    On a CPU, where the engine runs the model untied, under each name.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    model = tiny_model(kind, tied=True)
    files = saved(model, tmp_path)
    found = in_files(AutoModelForCausalLM.from_pretrained(tmp_path))
    as_in_files = has_gpu or kind == "gemma2"
    assert found.keys() == files.keys() | (set() if as_in_files else {"lm_head.weight"})
    head = found["model.embed_tokens.weight" if as_in_files else "lm_head.weight"]
    assert torch.equal(head, files["model.embed_tokens.weight"])


def test_what_is_missing_has_the_models_own_name() -> None:
    model = tiny_model()
    some = [(name, weight) for name, weight in model.named_parameters() if "norm" not in name]
    with pytest.raises(RunFailure, match=r"model\.norm\.weight is missing"):
        list(ExpectedWeights(model).in_files(some))
    model = mixture("glm4_moe")
    with pytest.raises(RunFailure, match=r"e_score_correction_bias is missing"):
        list(ExpectedWeights(model).in_files(model.named_parameters()))
