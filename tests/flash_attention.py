"""Flash attention on the CPU: transformers' code around it, and kernels written with torch's attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def use_flash(model, monkeypatch: pytest.MonkeyPatch, kernel: str = "flash_attention_2") -> None:
    """Makes the model run this kernel, the only one that is installed."""
    for interface, known in (
        (AttentionInterface, ALL_ATTENTION_FUNCTIONS),
        (AttentionMaskInterface, ALL_MASK_ATTENTION_FUNCTIONS),
    ):
        interface.register(kernel, known["flash_attention_2"])

    def installed(name: str | None, *_: object, **__: object):
        if name != kernel:
            raise ImportError(f"no kernel {name}")
        return _padded, _varlen, None, *(getattr(modeling_flash_attention_utils, f) for f in _PADDING)

    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", installed)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    model.config._attn_implementation_internal = kernel


_PADDING = ("_pad_input", "_unpad_input")


def _padded(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False):
    """(B, L, heads, D), aligned at the end."""
    q, k, v = (states.transpose(1, 2) for states in (q, k, v))
    mask = None
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    found = scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True)
    return found.transpose(1, 2)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
):
    """(tokens of all sequences, heads, D)."""
    ends = [cu_seqlens.tolist()[1:-1] for cu_seqlens in (cu_seqlens_q, cu_seqlens_k)]
    sequences = zip(*(x.tensor_split(e) for x, e in ((q, ends[0]), (k, ends[1]), (v, ends[1]))), strict=True)
    return torch.cat([_padded(*(x[None] for x in each), softmax_scale, causal)[0] for each in sequences])
