"""The wrapper around torch's variable-length attention, with a kernel for the CPU in its place."""

from __future__ import annotations

import inspect
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import MistralConfig, MistralForCausalLM

from rlctl.batch import ModelInputs
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.varlen import NAME, refuse_varlen, register
from rlctl.errors import EnvironmentFailure, UsageError
from tests.models import tiny_model

SIGNATURE = inspect.signature(torch_varlen.varlen_attn)


def by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """What torch documents for `varlen_attn`: (N, heads, D), each sequence apart."""
    ends = cu_seq_q.tolist()
    assert cu_seq_k.tolist() == ends
    assert max_q == max_k == max(b - a for a, b in pairwise(ends))
    assert enable_gqa or key.shape[1] == query.shape[1]
    left, right = window_size
    found = []
    for start, end in pairwise(ends):
        ahead = torch.arange(end - start)[:, None] - torch.arange(end - start)  # how far before the query
        seen = (ahead >= -right if right >= 0 else True) & (ahead <= left if left >= 0 else ahead == ahead)
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        found.append(
            scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(found)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The offsets of each call."""
    calls: list[Tensor] = []

    def record(*arguments: Any, **options: Any) -> Tensor:
        SIGNATURE.bind(*arguments, **options)
        calls.append(arguments[3])
        return by_sequence(*arguments, **options)

    monkeypatch.setattr(torch_varlen, "varlen_attn", record)
    return calls


def windowed() -> MistralForCausalLM:
    """Each token sees fifteen tokens before it."""
    torch.manual_seed(1)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return MistralForCausalLM(MistralConfig(sliding_window=16, **sizes, **heads)).eval()


def a_batch(lengths: list[int]) -> ModelInputs:
    """Sequences of these lengths with two unscored tokens each."""
    made = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 20, (sum(lengths),), generator=made)
    scored = torch.cat([torch.arange(length) >= 2 for length in lengths])
    return ModelInputs(ids, scored, torch.tensor(lengths))


def answers(module: PolicyModule, inputs: ModelInputs) -> list[Tensor]:
    """Log-probs and all gradients of their sum."""
    log_probs, *_ = module(inputs)
    parameters = [p for p in module.model.parameters() if p.requires_grad]
    return [log_probs.detach(), *torch.autograd.grad(log_probs.sum(), parameters, allow_unused=True)]


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_batches_have_the_log_probs_and_gradients_of_dense_attention(
    kind: str, layout: str, kernel: list[Tensor]
) -> None:
    """A sequence longer than a window is padded: there `sdpa` runs, with its window."""
    lengths = [22, 19, 20, 3] if (kind, layout) == ("mistral", "padded") else [5, 3, 7, 4]
    model, inputs = windowed() if kind == "mistral" else tiny_model(kind, seed=1), a_batch(lengths)
    wanted = PolicyModule(model, 0.7, share_prompts=False)
    wanted.reader.layout = "padded"
    want = answers(wanted, inputs)
    register()
    model.set_attn_implementation(NAME)
    module = PolicyModule(model, 0.7)
    assert module.reader.packs
    kernel.clear()  # of the probes
    module.reader.layout = layout
    for got, expected in zip(answers(module, inputs), want, strict=True):
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    assert len(kernel) == (model.config.num_hidden_layers if layout == "packed" else 0)
    assert all(each is kernel[0] for each in kernel)  # computed once per pass


def test_generation_equals_that_of_dense_attention(kernel: list[Tensor]) -> None:
    """Left padding, a cache, and a window that generated tokens leave."""
    model = windowed()
    ids = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options)
    register()
    model.set_attn_implementation(NAME)
    assert torch.equal(model.generate(ids, **options), want)
    assert kernel == []


def test_many_short_sequences_are_packed(kernel: list[Tensor]) -> None:
    """Kernels that separate sequences do not compare tokens of different ones, so a long row is cheap."""
    model = tiny_model("llama", seed=1)
    register()
    model.set_attn_implementation(NAME)
    module = PolicyModule(model, 1.0)
    inputs = a_batch([30 + place % 7 for place in range(200)])
    assert module.reader.plan([inputs]).startswith("packed rows")
    module.reader.layout = None
    kernel.clear()
    module(inputs)
    assert kernel


def test_what_the_kernels_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, capped = tiny_model("llama").config, tiny_model("gemma2").config
    with pytest.raises(EnvironmentFailure, match="CUDA"):
        refuse_varlen(plain)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refuse_varlen(plain)
    with pytest.raises(UsageError, match="soft-cap"):
        refuse_varlen(capped)
    plain.head_dim = 512
    with pytest.raises(UsageError, match="heads of 512"):
        refuse_varlen(plain)


def test_a_torch_without_the_module_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(EnvironmentFailure, match=r"has no torch\.nn\.attention\.varlen") as caught:
        refuse_varlen(tiny_model("llama").config)
    assert "sdpa" in (caught.value.fix or "")
