"""The wrapper around torch's variable-length attention, with a kernel for the CPU in its place."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import MistralConfig, MistralForCausalLM

from rlctl.engine.varlen import cu_seqlens, packed_inputs, refuse_varlen, register
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.prefix import body_of
from tests.models import tiny_model

SIGNATURE = inspect.signature(torch_varlen.varlen_attn)
CUDA, LENGTHS = torch.device("cuda", 0), [5, 1, 9, 3]


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
    """Each token sees three tokens before it."""
    torch.manual_seed(1)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return MistralForCausalLM(MistralConfig(sliding_window=4, **sizes, **heads)).eval()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_packed_sequences_have_the_states_and_gradients_of_separate_ones(
    kind: str, kernel: list[Tensor]
) -> None:
    model = windowed() if kind == "mistral" else tiny_model(kind, seed=1)
    body = body_of(model)
    tokens = [
        torch.randint(3, 30, (length,), generator=torch.Generator().manual_seed(7)) for length in LENGTHS
    ]
    want = [body(input_ids=each[None]).last_hidden_state[0] for each in tokens]
    torch.cat(want).square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.set_attn_implementation(register())
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    offsets = cu_seqlens(LENGTHS)
    got = body(**packed_inputs(torch.cat(tokens), positions, offsets, max(LENGTHS))).last_hidden_state[0]
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-4, atol=1e-5)
    got.square().sum().backward()
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4)
    assert len(kernel) == model.config.get_text_config().num_hidden_layers
    assert all(each is offsets for each in kernel)  # computed once per pass


def test_offsets() -> None:
    found = cu_seqlens(LENGTHS)
    assert found.tolist() == [0, 5, 6, 15, 18]
    assert found.dtype == torch.int32


def test_inputs_of_another_shape_are_refused() -> None:
    ids, offsets = torch.arange(4), cu_seqlens([4])
    for arguments in ((ids[None], ids[None], offsets), (ids, ids[:3], offsets), (ids, ids, offsets.long())):
        with pytest.raises(ValueError, match=r"want \(N,\)|int32"):
            packed_inputs(*arguments, 4)


def test_what_the_kernels_cannot_compute_is_refused() -> None:
    plain, capped = tiny_model("llama").config, tiny_model("gemma2").config
    refuse_varlen(plain, torch.bfloat16, CUDA)
    with pytest.raises(EnvironmentFailure, match="CUDA"):
        refuse_varlen(plain, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(UsageError, match="float32"):
        refuse_varlen(plain, torch.float32, CUDA)
    with pytest.raises(UsageError, match="soft-cap"):
        refuse_varlen(capped, torch.bfloat16, CUDA)
    plain.head_dim = 512
    with pytest.raises(UsageError, match="heads of 512"):
        refuse_varlen(plain, torch.bfloat16, CUDA)
