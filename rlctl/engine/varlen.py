"""Attention over sequences that are packed in one row, by torch's variable-length flash kernels.

`torch.nn.attention.varlen.varlen_attn` needs a CUDA GPU and half precision, but no mask and no other package.
`register` makes it an attention implementation of transformers: a token attends to the tokens before it in
its own sequence, which the offsets of the pass separate (`layout.packed_rows`). All layers read the same
offsets. Other passes, such as generation with a cache, have no offsets and use `sdpa`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlctl.errors import EnvironmentFailure, UsageError

#: The name in `attn_implementation`.
NAME = "varlen"
_KEY = "model.attn_implementation"
_LARGEST_HEAD = 256


def register() -> None:
    """Registers the implementation with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _mask)


def refuse_varlen(config: Any) -> None:
    """Refuses models and hardware for which the kernels do not exist.

    Args:
        config: Hugging Face config of the model.

    Raises:
        EnvironmentFailure: torch finds no GPU, or is too old to have the kernels.
        UsageError: the model's attention is not plain softmax attention.
    """
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if not torch.cuda.is_available():
        raise EnvironmentFailure(f"{NAME} attention needs a CUDA GPU", where=_KEY, fix="write sdpa")
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError as error:
        message = f"torch {torch.__version__} has no torch.nn.attention.varlen"
        fix = "install a newer torch, or write sdpa"
        raise EnvironmentFailure(message, where=_KEY, fix=fix) from error
    problem = ""
    if getattr(text, "attn_logit_softcapping", None):
        problem = "does not soft-cap attention scores, as this model does"
    elif head_dim > _LARGEST_HEAD:
        problem = f"has no kernel for heads of {head_dim} numbers, at most {_LARGEST_HEAD}"
    elif "gpt_oss" in str(text.model_type):
        problem = "has no attention sinks, which this model has"
    if problem:
        raise UsageError(f"{NAME} attention {problem}", where=_KEY, fix="write sdpa")


def _mask(
    *sizes: Any, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **options: Any
) -> Tensor | None:
    """transformers' interface: no mask for a row of several sequences, otherwise that of `sdpa`."""
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None and not allow_is_causal_skip:  # positions restart
        return None
    found: Tensor | None = sdpa_mask(
        *sizes, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **options
    )
    return found


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: (R, heads, N, D) queries, keys and values → (R, N, heads, D), no weights.

    Args:
        cu_seq_lens_q, cu_seq_lens_k: (S + 1,) int32, offsets of one row; None: no packed row.
        max_length_q, max_length_k: number of tokens of the longest sequence.
    """
    from torch.nn.attention import varlen
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return attended, None
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
