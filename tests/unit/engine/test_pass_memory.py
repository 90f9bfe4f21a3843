"""Memory of a forward and a backward pass: the estimate of `--dry-run` and the measured size of all live
tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.batch import ModelInputs
from rlctl.engine.deepspeed_setup import recompute_layers
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.lora import add_lora
from rlctl.engine.values import ValueModule
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.memory import memory_parts, memory_total
from rlctl.run_spec.model_size import PUBLISHED, ModelSize, Shape
from rlctl.run_spec.run_spec import RunSpec
from tests.models import config_of
from tests.peak_memory import PeakMemory
from tests.sweeps import swept

ROWS, PROMPT, RESPONSE = 3, 10, 90
FAMILIES = {
    "llama": "meta-llama/Meta-Llama-3-8B",
    "qwen2": "Qwen/Qwen2.5-7B",
    "mistral": "mistralai/Mistral-7B-v0.3",
    "gemma": "google/gemma-7b",
}
AGAIN, EAGER = "model.enable_gradient_checkpointing=true", "model.attn_implementation=eager"


def shape_like(family: str, layers: int = 3) -> Shape:
    """The published one, every width a thirty-second."""
    big = PUBLISHED[FAMILIES[family]].shape
    heads, kv_heads = big.heads // 4, big.kv_heads // 4
    return Shape(layers, big.hidden // 32, big.inner // 32, heads, kv_heads, big.head_dim // 8, vocab=256)


def spec_of(*overrides: str) -> RunSpec:
    sizes = [f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}"]
    return load_spec([], [], [*sizes, f"actor.ppo_micro_batch_size_per_gpu={ROWS}", *overrides]).spec


def random_model(family: str, shape: Shape, spec: RunSpec):
    torch.manual_seed(0)
    config = config_of(family, shape, pad_token_id=0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[spec.engine.dtype]
    kernel = spec.model.attn_implementation
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel, dtype=dtype).eval()
    if spec.model.lora_rank:
        add_lora(model, spec.model.lora_rank, 16.0, spec.model.target_modules)
    if spec.model.enable_gradient_checkpointing:
        recompute_layers(model)
    return model


def measured(module: torch.nn.Module, vocabulary: int) -> int:
    """Bytes of the peak beside weights and gradients; one row is shorter, so that there is a mask."""
    rows = [torch.randint(2, vocabulary, (PROMPT + RESPONSE - (row == 0),)) for row in range(ROWS)]
    return peak(module, rows, RESPONSE)


def peak(module: Any, rows: Sequence[torch.Tensor], response: int) -> int:
    """Bytes of the peak beside weights and gradients; rows are packed, their last tokens are scored."""
    module.reader.layout = "packed"
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    scored = torch.cat([torch.arange(len(ids)) >= len(ids) - response for ids in rows])
    inputs = ModelInputs(torch.cat(list(rows)), scored, torch.tensor([len(ids) for ids in rows]))
    with PeakMemory() as memory:
        found = module(inputs)
        loss = (found[0] if isinstance(found, tuple) else found).sum()
        del found
        loss.backward()
    return memory.peak


def predicted(spec: RunSpec, shape: Shape, phases: set[str]) -> float:
    parts = memory_parts(spec, ModelSize("counted", 1, shape))
    return memory_total([part for part in parts if phases & set(part.phases)])


CASES = [
    *[(family, dtype, again) for family in FAMILIES for dtype in ("fp32", "bf16") for again in ([], [AGAIN])],
    *[("llama", dtype, [EAGER, *again]) for dtype in ("fp32", "bf16") for again in ([], [AGAIN])],
    *[("gemma", dtype, ["model.lora_rank=4"]) for dtype in ("fp32", "bf16")],
    ("qwen2", "bf16", ["model.lora_rank=4", AGAIN]),
    ("llama", "fp32", ["model.lora_rank=4", "model.target_modules=[q_proj,v_proj]"]),
]


#: Every family in both precisions, once with layers that are run again; eager attention; adapters.
SAMPLE = [
    *[("llama", "fp32", []), ("qwen2", "fp32", [AGAIN]), ("mistral", "fp32", []), ("gemma", "fp32", [AGAIN])],
    *[("llama", "bf16", [AGAIN]), ("qwen2", "bf16", []), ("mistral", "bf16", [AGAIN]), ("gemma", "bf16", [])],
    *[
        ("llama", "fp32", [EAGER]),
        ("llama", "bf16", [EAGER, AGAIN]),
        ("gemma", "fp32", ["model.lora_rank=4"]),
    ],
    *CASES[-2:],
]


@pytest.mark.parametrize(("family", "dtype", "overrides"), swept(CASES, SAMPLE))
def test_the_policys_pass(family: str, dtype: str, overrides: list[str]) -> None:
    shape, spec = shape_like(family), spec_of(f"engine.dtype={dtype}", *overrides)
    policy = PolicyModule(random_model(family, shape, spec), 1.0, share_prompts=False)
    wanted = predicted(spec, shape, {"head", "layers"})
    assert wanted == pytest.approx(measured(policy, shape.vocab), rel=0.15)


@pytest.mark.parametrize("overrides", [[], ["model.lora_rank=4"]])
def test_norms_of_queries_and_keys(overrides: list[str]) -> None:
    """Heads wider than the stream, as in the smaller ones of the family."""
    shape = Shape(3, 64, 192, heads=4, kv_heads=2, head_dim=32, vocab=256, norms_heads=True)
    spec = spec_of("engine.dtype=bf16", *overrides)
    policy = PolicyModule(random_model("qwen3", shape, spec), 1.0, share_prompts=False)
    wanted = predicted(spec, shape, {"head", "layers"})
    assert wanted == pytest.approx(measured(policy, shape.vocab), rel=0.15)


def test_a_large_vocabulary() -> None:
    shape = Shape(1, 64, 128, heads=2, kv_heads=2, head_dim=32, vocab=8192)
    spec = spec_of("engine.dtype=bf16")
    policy = PolicyModule(random_model("llama", shape, spec), 1.0, share_prompts=False)
    wanted = predicted(spec, shape, {"head", "layers"})
    assert wanted == pytest.approx(measured(policy, shape.vocab), rel=0.15)


@pytest.mark.parametrize("overrides", [[], [AGAIN]])
def test_the_critics_pass(overrides: list[str]) -> None:
    shape, spec = shape_like("qwen2"), spec_of("engine.dtype=bf16", "algorithm.adv_estimator=gae", *overrides)
    critic = ValueModule(random_model("qwen2", shape, spec), share_prompts=False)
    wanted = predicted(spec, shape, {"critic"})
    assert wanted == pytest.approx(measured(critic, shape.vocab), rel=0.15)


#: Responses to a prompt, size of a micro-batch, tokens of the prompt and of a response.
GROUPS = [
    (8, 8, 24, 5),  # a group in a row
    (8, 32, 24, 5),  # a group in each of four rows
    (4, 16, 8, 5),  # two groups in a row
    (8, 8, 24, 20),  # a group in three rows, with the prompt in each
    (8, 12, 24, 5),  # groups that micro-batches cut
    (8, 4, 24, 5),
    (1, 8, 24, 5),  # no siblings
    (8, 8, 8, 60),  # no two responses fit in one row
]
SIBLINGS = [(dtype, *group) for dtype in ("fp32", "bf16") for group in GROUPS]


@pytest.mark.parametrize(
    ("dtype", "n", "micro", "prompt", "response"),
    swept(SIBLINGS, [(("fp32", "bf16")[place % 2], *group) for place, group in enumerate(GROUPS)]),
)
def test_siblings_share_their_prompt(dtype: str, n: int, micro: int, prompt: int, response: int) -> None:
    """Measured is the micro-batch that takes most; where groups are cut, the estimate may be above it."""
    shape = shape_like("llama")
    sizes = [f"data.max_prompt_length={prompt}", f"data.max_response_length={response}", f"rollout.n={n}"]
    overrides = [*sizes, f"actor.ppo_micro_batch_size_per_gpu={micro}", f"engine.dtype={dtype}"]
    spec = load_spec([], [], [*overrides, "algorithm.adv_estimator=gae"]).spec
    policy = PolicyModule(random_model("llama", shape, spec), 1.0)
    assert policy.reader.packs
    total = max(24, micro)
    groups = torch.arange(total) // n
    peaks = []
    for start in range(0, total, micro):
        group = groups[start : start + micro]
        prompts = torch.stack([torch.arange(prompt) + int(one) + 2 for one in group])
        ids = torch.cat([prompts, torch.randint(2, shape.vocab, (len(group), response))], 1)
        peaks.append(peak(policy, list(ids), response))
    found = predicted(spec, shape, {"head", "layers"}) / max(peaks)
    assert 0.85 < found < (1.15 if micro % n == 0 or n % micro == 0 else 1.7)
