"""Liger's fused kernels in a Hugging Face model (Hsu et al. 2024, arXiv:2410.10989).

RMSNorm, rotary embedding and the gated feed-forward become one kernel each, which keep less for the
backward pass. The library's fused loss is not used: log-probs are taken here, at a temperature.
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

#: Activations that Liger's feed-forward layers compute, whatever the model's config says.
_ACTIVATIONS = {"LigerSwiGLUMLP": ("silu", "swish"), "LigerGEGLUMLP": ("gelu_pytorch_tanh",)}


def refuse_liger_here() -> None:
    """What this machine lacks for Liger's kernels.

    Raises:
        EnvironmentFailure: the library is not installed, or there is no GPU that the kernels run on
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
            "Liger's kernels need a GPU, and torch sees none", where=_KEY, fix="set it to false"
        )


def run_liger(model: Any) -> None:
    """Have `model`, and copies made of it, run Liger's kernels, where `refuse_liger_here` lets it.

    Other models of the process keep their norms and feed-forward layers. The rotary embedding is a
    function that an architecture's models share: theirs becomes Liger's too, on devices that have it.

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
    # The library also replaces the classes that later models are made of.
    for name, value in before.items():
        if isinstance(value, type):
            setattr(architecture, name, value)
    if (plain := before.get(_ROTARY)) and plain is not getattr(architecture, _ROTARY):
        setattr(architecture, _ROTARY, _on_gpus(getattr(architecture, _ROTARY), plain))
    _refuse_other_activation(model)


def _on_gpus(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A model of the same architecture may stay on the CPU, such as one that gives rewards."""

    @wraps(plain)
    def rotary(q: Any, *args: Any, **kwargs: Any) -> Any:
        return (kernel if q.is_cuda or _interprets() else plain)(q, *args, **kwargs)

    return rotary


def _refuse_other_activation(model: Any) -> None:
    """The library replaces feed-forward layers whatever their activation."""
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
