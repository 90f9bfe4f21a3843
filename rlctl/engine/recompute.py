"""Activation (gradient) checkpointing: a layer stores its input and is recomputed in the backward pass.

This needs memory for one input per layer and the activations of one layer, at the cost of one more
forward pass (Chen et al. 2016, arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rlctl.errors import UsageError


def recompute_layers(model: Any) -> None:
    """Makes each decoder layer of `model` recompute its activations in the backward pass.

    The option of transformers works in training mode only, which also enables dropout: the trained policy
    would differ from the sampling policy. Passes without gradient are unchanged. A recomputed layer must
    not append to a key-value cache: run the model with `use_cache=False`.

    Args:
        model: Hugging Face causal language model, changed in place.

    Raises:
        UsageError: the model does not mark the layers that can be recomputed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"{type(model).__name__} does not support gradient checkpointing",
            where="model.enable_gradient_checkpointing",
            fix="set it to false, and actor.ppo_micro_batch_size_per_gpu lower",
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
