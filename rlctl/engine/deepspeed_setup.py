"""What DeepSpeed is given: its configuration, and the prepared model. Imports no DeepSpeed."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, Literal, NotRequired, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlctl.engine.sequence_parallel import SequenceParallel
from rlctl.errors import EnvironmentFailure, UsageError
from rlctl.routing import recomputing
from rlctl.run_spec.memory import REDUCE_BUCKET

Offload = Literal["none", "optimizer", "all"]
#: torch's compiler of kernels.
INDUCTOR = "inductor"
#: Graphs of one kind of layer that torch keeps: with and without gradient, mask, adapters, one row or many.
#: Above its default of 8 it stops compiling.
_GRAPHS = 32
_COMPILE = "model.compile_layers"


class Settings(TypedDict):
    """Training settings of a module.

    Attributes:
        zero_stage: 0–3.
        dtype: dtype of forward and backward pass; optimizer states are float32.
        weight_decay, betas: of AdamW.
        grad_clip: maximum global gradient norm; 0: no clipping.
        gradient_checkpointing: recompute layers in the backward pass instead of storing activations.
        compile_backend: backend of `torch.compile` for the layers; None: they are not compiled.
        offload: what is kept in host memory, see `deepspeed_config`.
        shard_size: number of ranks that share one copy of sharded weights; None: all ranks.
        more_config: merged into DeepSpeed's configuration.
        sequence: sequence-parallel group; policy only.
    """

    zero_stage: int
    dtype: torch.dtype
    weight_decay: float
    betas: tuple[float, float]
    grad_clip: float
    gradient_checkpointing: NotRequired[bool]
    compile_backend: NotRequired[str | None]
    offload: NotRequired[Offload]
    shard_size: NotRequired[int | None]
    more_config: NotRequired[Mapping[str, Any]]
    sequence: NotRequired[SequenceParallel | None]


def frozen_settings(dtype: torch.dtype, shard_size: int | None = None) -> Settings:
    """Settings of a module that is never trained."""
    return Settings(
        zero_stage=3,
        dtype=dtype,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        grad_clip=0.0,
        shard_size=shard_size,
    )


def zero_stage_of(settings: Settings) -> int:
    """The ZeRO stage that DeepSpeed uses: in bf16 at least 1.

    DeepSpeed's bf16 path without ZeRO drifts from its ZeRO paths. Stage 1 keeps the float32 master weights in
    the same way and differs from stage 0 only in where they are stored.
    """
    return max(settings["zero_stage"], 1) if settings["dtype"] == torch.bfloat16 else settings["zero_stage"]


def deepspeed_config(settings: Settings) -> dict[str, Any]:
    """DeepSpeed's configuration.

    `offload` moves float32 weights, moments and the step itself to the host ("optimizer", from stage 1 on),
    and between their uses the parameters too ("all", stage 3).
    """
    dtype = settings["dtype"]
    offload = settings.get("offload", "none")
    stage = zero_stage_of(settings)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": REDUCE_BUCKET}
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    if (size := settings.get("shard_size")) and stage == 3:  # see deepspeed.ai/tutorials/zeropp
        zero["zero_hpz_partition_size"] = size
    own = {
        # Dtype of sums over ranks. Stages 2 and 3 sum the bf16 gradients of every micro-batch: a sum in bf16
        # has a relative error of 0.2 % for two ranks, and more for more ranks.
        "communication_data_type": "fp32",
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings["grad_clip"] if stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # At stage 1 each gradient is added to the float32 sum and freed as soon as it is computed.
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True},
        # Dtype of the sum over micro-batches: bf16 would lose terms below 1/256 of the sum.
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
    }
    return merged(own, settings.get("more_config", {}))


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` updated with `more`; nested mappings are merged recursively."""
    result = dict(base)
    for key, value in more.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def compile_layers(model: Any, backend: str) -> None:
    """Compiles each layer of the model alone; layers of one kind share graphs, for all sizes of their input.

    Call it before `recompute_layers`, so that a recomputed layer is a compiled one, and before hooks are
    added to the layers.

    Args:
        backend: of `torch.compile`.

    Raises:
        UsageError: the model does not mark its layers.
        EnvironmentFailure: there is no C compiler.
    """
    if backend == INDUCTOR and not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        message = "torch.compile needs a C compiler, and found none"
        raise EnvironmentFailure(message, where=_COMPILE, fix="install gcc, or set it to false")
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    dynamo.recompile_limit = max(dynamo.recompile_limit, _GRAPHS)
    for layer in layers_of(model, _COMPILE, "set it to false"):
        layer.forward = _compiled(layer.forward, backend)


def _compiled(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """`forward`, compiled unless it gets a cache: each layer's place in it would need a graph of its own."""
    compiled = torch.compile(forward, backend=backend, dynamic=True)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        uses_cache = kwargs.get("past_key_values") is not None
        return (forward if uses_cache else compiled)(*args, **kwargs)

    return run


def layers_of(model: Any, key: str, fix: str) -> list[Any]:
    """The layers of a transformers model, in order.

    Raises:
        UsageError: the model does not mark them; `key` and `fix` are those of the error.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"{type(model).__name__} does not mark its layers, which this needs", where=key, fix=fix
        )
    return layers


def recompute_layers(model: Any) -> None:
    """Activation (gradient) checkpointing: a layer stores its input and is recomputed in the backward pass.

    This needs memory for one input per layer and the activations of one layer, at the cost of one more
    forward pass (Chen et al. 2016, arXiv:1604.06174).

    The option of transformers works in training mode only, which also enables dropout: the trained policy
    would differ from the sampling policy. Passes without gradient are unchanged. A recomputed layer must
    not append to a key-value cache: run the model with `use_cache=False`.

    Raises:
        UsageError: the model does not mark the layers that can be recomputed.
    """
    fix = "set it to false, and actor.ppo_micro_batch_size_per_gpu lower"
    for layer in layers_of(model, "model.enable_gradient_checkpointing", fix):
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(forward, *args, context_fn=recomputing, **options, **kwargs)

    return run


def unrounded_weights(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name → weight as loaded, of the trained parameters that `dtype` rounds; empty in float32."""
    if dtype == torch.float32:
        return {}
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype != dtype and not hasattr(parameter, "ds_id")
    }


@contextlib.contextmanager
def keeping_buffers(model: Any) -> Iterator[None]:
    """Restores the values and dtypes of all buffers after the model was cast inside.

    Casting a module also rounds its rotary frequencies to bf16. The model would then differ from the one
    that a rollout engine loads: a mismatch at every position, growing with the length.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(buffer.device)


def expert_blocks(module: nn.Module) -> list[nn.Module]:
    """Modules that run a data-dependent selection from a list of experts.

    Ranks select different experts, but gathering an expert's weights is a collective: all experts of a block
    must be gathered together. Experts stored in one tensor need no treatment. A list of experts is identified
    by its length, because the config contains it, whatever the architecture calls the list.
    """
    modules: list[Any] = list(module.modules())
    configs = [submodule.config.get_text_config() for submodule in modules if hasattr(submodule, "config")]
    counts = {
        value
        for config in configs
        for key, value in config.to_dict().items()
        if "expert" in key and "per_tok" not in key and isinstance(value, int) and value > 1
    }
    found: list[nn.Module] = []
    for block in modules:
        for name, child in block.named_children():
            is_list = isinstance(child, nn.ModuleList | nn.ModuleDict) and len(child) in counts
            # The list of layers may have the same length; the module that contains it has a config.
            if is_list and ("expert" in name or not hasattr(block, "config")):
                found.append(block)
    return found


def module_options(settings: Settings) -> dict[str, bool]:
    """Options of a module: whether it may share prompts, and be probed before DeepSpeed wraps it.

    Under ZeRO-3 every call of the body is a collective, so ranks must make the same number of calls, and the
    body can run only after DeepSpeed has wrapped it. With gradient checkpointing, a recomputed layer would
    append to the keys and values of the shared prompt a second time.
    """
    whole = settings["zero_stage"] < 3
    return {"share_prompts": whole and not settings.get("gradient_checkpointing"), "probe": whole}
