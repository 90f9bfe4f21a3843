"""Computes a prompt that several responses share once and repeats its keys and values.

The n responses to a prompt are adjacent rows that begin with the same tokens. Attention reads earlier
tokens only through their keys and values, so one computation per prompt is enough, in sampling and in
training. In training, the gradients of the n responses add up in the shared keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

#: What a model raises for inputs that it does not support.
UNSUPPORTED = (ValueError, TypeError, RuntimeError, AttributeError, LookupError)
#: Largest relative difference that the probe accepts: allows bfloat16 rounding, detects a lost prefix.
_TOLERANCE = 0.05


def reads_more_than_text(config: Any) -> bool:
    """Whether a model also reads images or audio: then its text decoder has a separate config."""
    return bool(config.get_text_config() is not config)


def body_of(model: Any) -> Any:
    """The module of a causal language model that computes hidden states, or None if it is not separate.

    This is the model without its output head; for a multimodal model, its text decoder.
    """
    name = base_name(model)
    body = getattr(model, name) if name else None
    if body is None or not reads_more_than_text(model.config):
        return body
    find = getattr(body, "get_decoder", None)  # custom model code may lack it
    return None if find is None else find()


def base_name(model: Any) -> str | None:
    """Name of the attribute of `model` that holds all of it but its output head; None if there is none."""
    names = (model.base_model_prefix, "model")  # Llama 4 has another name than its prefix
    return next((name for name in names if isinstance(getattr(model, name, None), nn.Module)), None)


def shared_prefix(body: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
    """Keys and values of the first K tokens of all rows, computed once per run of equal adjacent rows.

    Args:
        body: a causal language model without its head.
        input_ids, position_ids: (B, K) int64.
        attention_mask: (B, K) bool.

    Returns:
        A cache of B rows that `body` can continue, or None if nothing is shared or `has_keys_only` is false.
    """
    differs = (input_ids[1:] != input_ids[:-1]) | (attention_mask[1:] != attention_mask[:-1])
    is_new = functional.pad(differs.any(1), (1, 0), value=True)
    if is_new.all() or input_ids.shape[1] == 0:
        return None
    output = body(
        input_ids=input_ids[is_new],
        attention_mask=attention_mask[is_new].long(),
        position_ids=position_ids[is_new],
        use_cache=True,
    )
    cache: Any = getattr(output, "past_key_values", None)
    if not has_keys_only(cache):
        return None
    cache.batch_select_indices(is_new.cumsum(0) - 1)
    return cache


def has_keys_only(cache: Any) -> bool:
    """Whether a model's cache contains keys and values only: no recurrent state, and no cache of its own."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return isinstance(cache, DynamicCache) and all(type(layer) in plain for layer in cache.layers)


def equal_beginnings(rows: Tensor) -> Tensor:
    """(B − 1, P) bool: the first tokens that each row but the first shares with the row before.

    Args:
        rows: (B, P) token ids, padded on the right with −1.
    """
    return ((rows[1:] == rows[:-1]) & (rows[1:] >= 0)).long().cumprod(1).bool()


def shortest_window(config: Any) -> int:
    """Shortest attention window of all layers, in tokens."""
    names = ("sliding_window", "attention_chunk_size")
    return min(getattr(config, name, None) or 1 << 62 for name in names)


@torch.no_grad()
def can_share_prefix(model: Any) -> bool:
    """Whether the model gives the same states from repeated keys and values as from whole rows.

    Recurrent states and unusual caches cannot be repeated. Instead of a list of architectures, this
    checks the type of the cache and compares both computations on a short probe. Returns False with
    gradient checkpointing.
    """
    body = body_of(model)
    checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if body is None or checkpoints:
        return False
    with evaluating(model):
        try:
            return _continues(body, model.config.get_text_config())
        except UNSUPPORTED:
            return False


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Sets a model to evaluation mode inside the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _continues(body: Any, config: Any) -> bool:
    device = next(body.parameters()).device
    positions = torch.arange(4, device=device).expand(2, 4)
    probe = positions % config.vocab_size
    mask = torch.ones_like(positions)
    whole = body(input_ids=probe, attention_mask=mask, position_ids=positions).last_hidden_state[:, 2:]
    cache = shared_prefix(body, probe[:, :2], mask[:, :2].bool(), positions[:, :2])
    if cache is None:
        return False
    # Padding between the shared tokens and the others; in a window that is shorter, there is none.
    padded = [2] * (shortest_window(config) > 4)
    ones = mask[:, : len(padded)]
    parts = body(
        input_ids=probe[:, [*padded, 2, 3]],
        attention_mask=torch.cat([mask[:, :2], 0 * ones, mask[:, 2:]], 1),
        position_ids=positions[:, [*padded, 2, 3]],
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state[:, len(padded) :]
    gap = (parts.float() - whole.float()).norm() / whole.float().norm()
    return bool(gap < _TOLERANCE)
