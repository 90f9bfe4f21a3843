"""Prompts that siblings share are run once, and their keys and values repeated.

The n responses to a prompt stand in adjacent rows that begin with the same tokens. Attention reads
the past only through keys and values, so these need computing once per prompt, when sampling as well
as (gradient included: it adds up over the siblings) when training.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

#: Largest difference the probe may show, relative: room for bfloat16, none for a lost prefix.
_TOLERANCE = 0.05


def reads_more_than_text(config: Any) -> bool:
    """Whether a model reads images or sound as well: its text decoder has a config of its own."""
    return bool(config.get_text_config() is not config)


def body_of(model: Any) -> Any:
    """What of a causal language model makes states of text, or None where that is no part of its own.

    That is the model without its output head; of a model that reads images as well its text decoder.
    """
    body = getattr(model, model.base_model_prefix, None)
    if body is None or body is model:
        return None
    if not reads_more_than_text(model.config):
        return body
    find = getattr(body, "get_decoder", None)  # code of the model's own may not have it
    return None if find is None else find()


def shared_prefix(body: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
    """Keys and values of rows' first K tokens, computed once for equal rows next to each other.

    Args:
        body: a causal language model without its head.
        input_ids, position_ids: (B, K) int64.
        attention_mask: (B, K) bool.

    Returns:
        A cache of B rows that `body` continues, or None where there is nothing to share.
    """
    step = _equal_neighbours(input_ids, attention_mask)
    if step == 1 or input_ids.shape[1] == 0:
        return None
    output = body(
        input_ids=input_ids[::step],
        attention_mask=attention_mask[::step].long(),
        position_ids=position_ids[::step],
        use_cache=True,
    )
    cache = getattr(output, "past_key_values", None)  # recurrent models name theirs otherwise
    if isinstance(cache, DynamicCache):
        cache.batch_repeat_interleave(step)
    return cache


def _equal_neighbours(input_ids: Tensor, attention_mask: Tensor) -> int:
    """The largest number that all rows can be cut into blocks of, each of equal rows."""
    differs = (input_ids[1:] != input_ids[:-1]) | (attention_mask[1:] != attention_mask[:-1])
    starts = differs.any(1).nonzero().flatten() + 1
    return math.gcd(len(input_ids), *starts.tolist())


@torch.no_grad()
def can_share_prefix(model: Any) -> bool:
    """Whether the model goes on from repeated keys and values as it reads whole rows.

    Recurrent states and unusual caches cannot simply be repeated. Rather than know all
    architectures, read the cache and try a short probe both ways.
    """
    body = body_of(model)
    checkpoints = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if body is None or checkpoints:
        return False
    was_training = model.training
    model.eval()
    try:
        return _continues(body, model.config.get_text_config().vocab_size)
    finally:
        model.train(was_training)


def _continues(body: Any, vocabulary: int) -> bool:
    device = next(body.parameters()).device
    positions = torch.arange(4, device=device).expand(2, 4)
    probe, mask = positions % vocabulary, torch.ones_like(positions)
    whole = body(input_ids=probe, attention_mask=mask, position_ids=positions).last_hidden_state[:, 2:]
    cache = shared_prefix(body, probe[:, :2], mask[:, :2].bool(), positions[:, :2])
    if not isinstance(cache, DynamicCache):
        return False
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        return False
    parts = body(
        input_ids=probe[:, 2:],
        attention_mask=mask,
        position_ids=positions[:, 2:],
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    gap = (parts.float() - whole.float()).norm() / whole.float().norm()
    return bool(gap < _TOLERANCE)
