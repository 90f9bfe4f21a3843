"""Liger's fused kernels in a Hugging Face model (Hsu et al. 2024, arXiv:2410.10989).

RMSNorm, rotary embedding and gated feed-forward become one kernel each, which stores less for the
backward pass. The library's fused loss is not used: rlctl computes log-probs itself, at a temperature.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from rlctl.errors import EnvironmentFailure, UsageError

_KEY = "model.use_liger"
_ROTARY = "apply_rotary_pos_emb"

#: Activations that Liger's feed-forward layers compute, regardless of the model's config.
_ACTIVATIONS = {"LigerSwiGLUMLP": ("silu", "swish"), "LigerGEGLUMLP": ("gelu_pytorch_tanh",)}


def refuse_liger_here() -> None:
    """Refuses Liger's kernels if this machine cannot run them.

    Raises:
        EnvironmentFailure: the library is not installed, or there is no GPU for the kernels
            (with `TRITON_INTERPRET=1` Triton interprets them on a CPU).
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise EnvironmentFailure(
            "Liger's kernels are not installed",
            where=_KEY,
            fix='pip install "rlctl[liger]", or set it to false',
        )
    if not (torch.cuda.is_available() or _interprets()):
        raise EnvironmentFailure(
            "Liger's kernels need a GPU, and torch found none", where=_KEY, fix="set it to false"
        )


def run_liger(model: Any) -> None:
    """Makes `model`, and later copies of it, use Liger's kernels; call `refuse_liger_here` first.

    Other models in the process keep their norms and feed-forward layers. The rotary embedding is a
    function that all models of an architecture share: it becomes Liger's for them too, on GPUs.

    Args:
        model: Hugging Face causal language model, changed in place.

    Raises:
        UsageError: the library has no kernels for the architecture, or none for its activation.
    """
    patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    if model.config.model_type not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UsageError(
            f"Liger has no kernels for {type(model).__name__}", where=_KEY, fix="set it to false"
        )
    architecture = sys.modules[type(model).__module__]
    before = dict(vars(architecture))
    without_loss = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    patches._apply_liger_kernel_to_instance(model=model, **without_loss)
    # The library also replaces the architecture's classes: restore them for later models.
    for name, value in before.items():
        if isinstance(value, type):
            setattr(architecture, name, value)
    if (plain := before.get(_ROTARY)) and plain is not getattr(architecture, _ROTARY):
        setattr(architecture, _ROTARY, _on_gpus(getattr(architecture, _ROTARY), plain))
    _refuse_other_activation(model)


def _on_gpus(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` on GPUs, else `plain`: a reward model of the same architecture may be on a CPU."""

    @wraps(plain)
    def rotary(q: Any, *args: Any, **kwargs: Any) -> Any:
        return (kernel if q.is_cuda or _interprets() else plain)(q, *args, **kwargs)

    return rotary


def _refuse_other_activation(model: Any) -> None:
    """Refuses activations that the kernels do not compute, because the library does not check them."""
    config = model.config.get_text_config()
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    for kind in {module._get_name() for module in model.modules()} & _ACTIVATIONS.keys():
        if activation not in _ACTIVATIONS[kind]:
            raise UsageError(
                f"{type(model).__name__} uses the activation {activation}, and Liger's kernel computes "
                f"{_ACTIVATIONS[kind][0]}",
                where=_KEY,
                fix="set it to false",
            )


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
