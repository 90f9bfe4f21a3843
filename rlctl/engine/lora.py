"""Low-rank adapters: few trained weights added to a frozen model (Hu et al. 2021, arXiv:2106.09685).

A layer W becomes W + (α/r)·B·A with A (r, in) random and B (out, r) zero, so that training starts at
the unmodified model. Only A and B are trained. They have the engine's dtype like all other weights:
DeepSpeed computes in one dtype, and in bf16 runs keeps float32 master copies of trained weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlctl.errors import UsageError, one_line
from rlctl.model_files import check_adapter
from rlctl.run_spec.model import ALL_LINEAR, ModelSpec

if TYPE_CHECKING:
    from rlctl.batch import ModelInputs
    from rlctl.engine.protocol import TrainEngine

ADAPTER = "default"  # PEFT's name of the adapter
#: Prefix of parameter names in PEFT's files.
_PEFT_PREFIX = "base_model.model."
#: Architecture → layers whose weight it reads itself: an adapter would not act, but would be merged.
_READ_WITHOUTADAPTER = {"jamba": ("dt_proj",)}


def add_lora(model: Any, rank: int, alpha: float, target_modules: list[str]) -> None:
    """Adds an adapter to linear layers of `model`, in place, and freezes all other parameters.

    The class of the model does not change. A is drawn from torch's global generator.

    Args:
        rank, alpha: r, α.
        target_modules: last components of layer names, such as `q_proj`, or `all-linear`.

    Raises:
        UsageError: a name matches no linear layer, or one that PEFT refuses or takes for an expert.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=_targets(model, target_modules))
    try:
        inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:  # such as layers whose weight a kernel reads without the adapter
        message = f"PEFT refuses the adapter: {one_line(error)}"
        fix = "name other layers"
        raise UsageError(message, where="model.target_modules", fix=fix) from error
    if config.target_parameters:  # layers with a name that experts had before transformers 5, as gate_proj
        others = sorted({name.rpartition(".")[2] for name in config.target_modules})
        message = f"PEFT adapts the experts of {type(model).__name__}, not all of the requested layers"
        raise UsageError(message, where="model.target_modules", fix=f"choose from {', '.join(others)}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


@torch.no_grad()
def load_adapter(model: Any, spec: ModelSpec) -> None:
    """Sets the adapter that `add_lora` added to that of `spec.lora_adapter_path`.

    Raises:
        UsageError: it cannot be read, or has other layers, or another rank or alpha than the model's.
    """
    from peft import load_peft_weights
    from peft.utils import CONFIG_NAME
    from safetensors import SafetensorError
    from transformers.utils import cached_file

    path = str(spec.lora_adapter_path)
    where = f"model.lora_adapter_path={path}"
    try:
        check_adapter(str(Path(str(cached_file(path, CONFIG_NAME))).parent), spec)
        loaded: dict[str, Tensor] = load_peft_weights(path, device="cpu")
    except (OSError, ValueError, SafetensorError) as error:
        fix = "name a directory with adapter_config.json and adapter_model.safetensors, or a hub id"
        raise UsageError(f"the adapter cannot be read: {one_line(error)}", where=where, fix=fix) from error
    own = adapter_parameters(model)
    others = sorted(own.keys() ^ loaded.keys())
    if others:
        layers = sorted({name.split(".")[-3] for name in loaded})
        message = (
            f"the adapter and model.target_modules have other layers: {others[0]} and {len(others) - 1} more"
        )
        raise UsageError(message, where=where, fix=f"model.target_modules=[{','.join(layers)}]")
    for name, parameter in own.items():
        if parameter.shape != loaded[name].shape:
            shapes = f"{tuple(loaded[name].shape)} in the adapter, {tuple(parameter.shape)} in the model"
            raise UsageError(f"{name} is {shapes}", where=where, fix="name the adapter's own base model")
        parameter.copy_(loaded[name])


def _targets(model: Any, wanted: list[str]) -> list[str]:
    """Full names of the requested layers: no frozen ones, and no subclasses, such as routers."""
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and module.weight.requires_grad
        and name.rpartition(".")[2] not in _READ_WITHOUTADAPTER.get(model.config.model_type, ())
    ]
    known = {name.rpartition(".")[2] for name in linear}
    if not linear:
        message = f"{type(model).__name__} has no linear layers to adapt"
        raise UsageError(message, where="model.lora_rank", fix="set it to 0 to train all weights")
    unknown = [name for name in wanted if name not in known | {ALL_LINEAR}]
    if unknown:
        message = f"{type(model).__name__} has no linear layer named {', '.join(unknown)}"
        fix = f"choose from {', '.join([*sorted(known), ALL_LINEAR])}"
        raise UsageError(message, where="model.target_modules", fix=fix)
    return [name for name in linear if ALL_LINEAR in wanted or name.rpartition(".")[2] in wanted]


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every A (r, in) and B (out, r), by its name in PEFT's files; empty without adapters."""
    return {
        _PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter weights of a model, separate from the model.

    Attributes:
        config: PEFT's configuration: r, α, the last components of the layer names, and the base model.
        tensors: as in `adapter_parameters`, on the host.
    """

    config: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, model: Any, tensors: dict[str, Tensor]) -> Adapter:
        """The adapter that `add_lora` added to `model`, with these values."""
        config = replace(
            model.peft_config[ADAPTER],
            base_model_name_or_path=model.name_or_path or None,
            revision=getattr(model.config, "_commit_hash", None),
            task_type="CAUSAL_LM",
            inference_mode=True,
        )
        # PEFT makes it a set, so the order in its file would vary.
        config.target_modules = sorted({name.split(".")[-3] for name in tensors})
        return cls(config, tensors)

    def save(self, directory: Path) -> None:
        """Writes `adapter_config.json` and `adapter_model.safetensors`, which PEFT and vLLM load."""
        from safetensors.torch import save_file

        self.config.save_pretrained(directory)
        save_file(self.tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


class OffloadedBase:
    """Moves the frozen weights of a model with adapters to the host and back.

    They never change, so their host copy is kept.

    Args:
        model: the model that was passed to `add_lora`, on its device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._device = self._frozen[0].device
        pins = self._device.type == "cuda"
        self._on_host = [torch.empty_like(p, device="cpu", pin_memory=pins).copy_(p) for p in self._frozen]
        self.is_parked = False

    def offload(self) -> None:
        """Moves the weights to the host, which frees the device memory."""
        if not self.is_parked:
            for parameter, copy in zip(self._frozen, self._on_host, strict=True):
                parameter.data = copy
            self.is_parked = True

    def onload(self) -> None:
        """Moves the weights back to the device."""
        if self.is_parked:
            for parameter, copy in zip(self._frozen, self._on_host, strict=True):
                parameter.data = copy.to(self._device, non_blocking=True, copy=True)
            self.is_parked = False


class BasePolicy:
    """The `ReferencePolicy` that a model with adapters contains: the model with adapters disabled."""

    def __init__(self, engine: TrainEngine, model: Any) -> None:
        self._engine = engine
        self._model = model

    @torch.no_grad()
    def log_probs(self, inputs: ModelInputs) -> Tensor:
        """See `ReferencePolicy.log_probs`."""
        with _without_adapters(self._model):
            return self._engine.policy(inputs).log_probs


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in adapted:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in adapted:
            layer.enable_adapters(True)
