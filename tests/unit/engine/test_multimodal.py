"""Models that read images as well: their text decoder is trained, what text never reaches is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Mistral3Config, Qwen2_5_VLConfig

from rlctl.batch import Episode, Task, TokenBatch, TokenSequence
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.lora import adapter_parameters, add_lora
from rlctl.engine.model import load_policy
from rlctl.engine.values import ValueModule
from rlctl.prefix import body_of
from rlctl.rollout.expected_weights import PlainWeights
from rlctl.rollout.hf import HFRollout
from rlctl.rollout.protocol import Request, Sampling
from tests.models import naive_log_probs, tiny_batch
from tests.own_model import save_tiny

GROUPED = {"num_key_value_heads": 1}
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "gemma3": (Gemma3Config, GROUPED | {"head_dim": 16, "sliding_window": 64, "tie_word_embeddings": True}),
    "mistral3": (Mistral3Config, GROUPED),
    "qwen2.5-vl": (Qwen2_5_VLConfig, GROUPED),
}


@pytest.fixture(scope="module", params=list(KINDS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config_class, shape = KINDS[request.param]
    return save_tiny(tmp_path_factory.mktemp(request.param.replace(".", "")), config_class, **shape)


def load(directory: Path) -> tuple[Any, Any]:
    return load_policy(
        str(directory),
        revision=None,
        trust_remote_code=False,
        attn_implementation="sdpa",
        dtype=torch.float32,
    )


def of_text(name: str) -> bool:
    return "language_model" in name or name.startswith("lm_head")


def test_only_what_text_reaches_is_trained(directory: Path) -> None:
    model, _ = load(directory)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if of_text(name)}
    assert len(trained) < len(list(model.parameters()))


def test_log_probs_are_those_of_the_whole_model_and_reach_every_trained_weight(directory: Path) -> None:
    model, _ = load(directory)
    batch = tiny_batch(model, rows=4)
    expected, _ = naive_log_probs(model, batch)
    module = PolicyModule(model, 1.0)
    assert (module.head.is_linear, module.reader.packs, module.reader.shares_prompts) == (True, True, True)
    log_probs, *_ = module(batch.inputs)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-4, atol=1e-5)
    log_probs.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_a_critic_holds_the_text_decoder_alone(directory: Path) -> None:
    model, _ = load(directory)
    critic = ValueModule(model)
    assert critic.reader.packs
    assert critic.body is body_of(model)
    assert sum(p.numel() for p in critic.body.parameters()) < sum(p.numel() for p in model.parameters())
    batch = tiny_batch(model, rows=4)
    assert critic(batch.inputs).shape == batch.advantages.shape


def test_adapters_are_in_the_text_decoder_only(directory: Path) -> None:
    model, _ = load(directory)
    add_lora(model, rank=2, alpha=4, target_modules=["q_proj", "k_proj", "v_proj"])
    names = list(adapter_parameters(model))
    assert len(names) == 2 * 2 * 3
    assert all(of_text(name) for name in names)
    every, _ = load(directory)
    add_lora(every, rank=2, alpha=4, target_modules=["all-linear"])
    assert all(of_text(name) for name in adapter_parameters(every))


def test_responses_are_sampled_and_scored_alike(directory: Path) -> None:
    model, tokenizer = load(directory)
    with torch.no_grad():  # far from uniform: a wrong position would show
        for parameter in model.parameters():
            parameter.mul_(5)
    rollout = HFRollout(model, tokenizer, "cpu")
    rollout.sync_weights(PlainWeights(model.named_parameters()), policy_version=1)
    prompts = [[5, 7, 9]] * 3 + [[3, 4, 5, 6]] * 3
    requests = [Request(prompt, seed) for seed, prompt in enumerate(prompts)]
    turns = rollout.sample(requests, Sampling(max_response_length=5))
    episodes = [
        Episode(Task(prompt, text=""), 0, (TokenSequence.of_turn(prompt, turn),), response="")
        for prompt, turn in zip(prompts, turns, strict=True)
    ]
    batch = TokenBatch.of(episodes)
    log_probs, *_ = PolicyModule(model, 1.0)(batch.inputs)
    torch.testing.assert_close(log_probs, batch.rollout_log_probs, rtol=1e-4, atol=1e-5)
