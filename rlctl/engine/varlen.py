"""Attention over sequences that are packed in one row, by torch's variable-length flash kernels.

`torch.nn.attention.varlen.varlen_attn` needs a CUDA GPU and half precision, but no mask and no other package.
`register` makes it an attention implementation of transformers; a model's body runs it with `packed_inputs`:

    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation=register())
    refuse_varlen(model.config, model.dtype, model.device)
    offsets = cu_seqlens(lengths, device)
    states = body(**packed_inputs(token_ids, position_ids, offsets, max(lengths)))  # (1, N, hidden)

Every token attends to the tokens before it in its own sequence. The offsets are computed once per pass; all
layers read the same tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlctl.errors import EnvironmentFailure, UsageError

#: The name in `attn_implementation`.
NAME = "varlen"
_KEY = "model.attn_implementation"
_LARGEST_HEAD = 256


def register() -> str:
    """Registers the implementation with transformers, and that it takes no mask; returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def refuse_varlen(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses models and hardware for which the kernels do not exist.

    Args:
        config: Hugging Face config of the model.

    Raises:
        EnvironmentFailure: the device is no CUDA GPU.
        UsageError: the dtype is not half precision, or the model's attention is not plain softmax attention.
    """
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if device.type != "cuda":
        raise EnvironmentFailure(f"{NAME} attention needs a CUDA GPU", where=_KEY, fix="write sdpa")
    problem = ""
    if dtype not in {torch.bfloat16, torch.float16}:
        problem = f"has no kernel for {str(dtype).removeprefix('torch.')}"
    elif getattr(text, "attn_logit_softcapping", None):
        problem = "does not soft-cap attention scores, as this model does"
    elif head_dim > _LARGEST_HEAD:
        problem = f"has no kernel for heads of {head_dim} numbers, at most {_LARGEST_HEAD}"
    elif "gpt_oss" in str(text.model_type):
        problem = "has no attention sinks, which this model has"
    if problem:
        raise UsageError(f"{NAME} attention {problem}", where=_KEY, fix="write sdpa")


def cu_seqlens(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """(S + 1,) int32: offsets of S packed sequences, from 0 to their number of tokens N."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def packed_inputs(token_ids: Tensor, position_ids: Tensor, offsets: Tensor, longest: int) -> dict[str, Any]:
    """Arguments of a model's body for one pass over packed sequences.

    Args:
        token_ids: (N,) int64, the sequences one after the other, without padding.
        position_ids: (N,) int64, position of each token in its own sequence.
        offsets: (S + 1,) int32 of `cu_seqlens`, on the same device.
        longest: number of tokens of the longest sequence.

    Raises:
        ValueError: the shapes do not fit.
    """
    if token_ids.ndim != 1 or token_ids.shape != position_ids.shape:
        raise ValueError(
            f"{tuple(token_ids.shape)} tokens, {tuple(position_ids.shape)} positions: want (N,) each"
        )
    if offsets.dtype != torch.int32 or offsets.device != token_ids.device:
        raise ValueError(f"offsets must be int32 on {token_ids.device}: {offsets.dtype} on {offsets.device}")
    sizes = {
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return {"input_ids": token_ids[None], "position_ids": position_ids[None], "use_cache": False, **sizes}


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: (1, heads, N, D) queries, keys and values → (1, N, heads, D), no weights."""
    from torch.nn.attention import varlen

    del module, attention_mask
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    output: Tensor = varlen.varlen_attn(  # type: ignore[assignment]
        queries,
        keys,
        values,
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        scale=scaling,
        # A token and the `sliding_window - 1` before it; without a window all before it.
        window_size=(sliding_window - 1 if sliding_window else -1, 0),
        enable_gqa=keys.shape[1] != queries.shape[1],
    )
    return output[None], None
