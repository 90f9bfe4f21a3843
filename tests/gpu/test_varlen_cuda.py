"""Torch's variable-length attention on a card, against each sequence apart."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rlctl.engine.layout import separations
from rlctl.engine.varlen import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA card on this machine"),
]
LENGTHS = [700, 1, 33, 512]


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_packed_sequences_are_separate(kv_heads: int) -> None:
    torch.manual_seed(0)
    heads = (8, kv_heads, kv_heads)
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    states = [torch.randn(1, count, sum(LENGTHS), 64, **options) for count in heads]
    sizes = separations(torch.tensor(LENGTHS), torch.device("cuda"))
    output, _ = attention(None, *states, None, **sizes)
    gradients = torch.autograd.grad(output.float().square().sum(), states)
    apart = zip(*(x.split(LENGTHS, 2) for x in states), strict=True)
    wanted = torch.cat(
        [scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True) for each in apart], 2
    ).transpose(1, 2)
    torch.testing.assert_close(output, wanted, rtol=0.02, atol=0.02)
    for ours, theirs in zip(
        gradients, torch.autograd.grad(wanted.float().square().sum(), states), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.1)
