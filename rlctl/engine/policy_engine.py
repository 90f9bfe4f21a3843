"""What training engines have in common, whatever divides the weights among the ranks.

An engine is made of two halves, which know nothing of each other:

- what is computed: `PolicyEngine` or `ValueEngine`, here. It wraps the Hugging Face model (`_wrapped`).
- how the weights are divided, stepped and saved: `_Engine` of `rlctl.engine.deepspeed` or of
  `rlctl.engine.fsdp`. Its constructor places the model, wraps it, and makes the optimizer.

Both derive from `Engine`, which has what they share; `class FsdpCritic(ValueEngine, _Engine)` joins two. The
constructor of the first half keeps its settings, and then calls that of the second one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from rlctl.batch import ModelInputs
from rlctl.engine.deepspeed_setup import Settings, compile_layers, recompute_layers
from rlctl.engine.layout import BodyReader
from rlctl.engine.log_probs import PolicyModule
from rlctl.engine.lora import ADAPTER, Adapter, adapter_parameters
from rlctl.engine.model import export
from rlctl.engine.perturb import parts_of, perturbed
from rlctl.engine.protocol import PolicyOutput
from rlctl.engine.ranks import Ranks
from rlctl.engine.state_files import StateFiles
from rlctl.engine.values import ValueModule


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """A weight of the model without adapters; its value includes the adapter, if `parts` contain one.

    Attributes:
        name: name in the model before `add_lora`.
        parts: the tensors that `value` reads, which must be available in full (under ZeRO-3 gathered): W,
            and A and B if it has an adapter.
        scale: α/r.
    """

    name: str
    parts: Sequence[Tensor]
    scale: float = 1.0

    @torch.no_grad()
    def value(self) -> Tensor:
        """W, or W + (α/r)·B·A computed in float32 and rounded once to W's dtype."""
        weight, *adapter = self.parts
        if not adapter:
            return weight.data
        down, up = (part.float().to(weight.device) for part in adapter)  # W may be on the host
        return torch.addmm(weight.float(), up, down, alpha=self.scale).to(weight.dtype)


def plain_weights(model: nn.Module, *, merged: bool = True) -> Iterator[PlainWeight]:
    """Every parameter that `model` had before `add_lora`, in its order, and every buffer in its files.

    Args:
        merged: include the adapters in the values; otherwise each value is the frozen W.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner, is_base, rest = name.partition(".base_layer.")
        if merged and is_base and rest == "weight":
            layer = modules[owner]
            adapter = [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]
            yield PlainWeight(f"{owner}.weight", [parameter, *adapter], layer.scaling[ADAPTER])
        elif ".lora_" not in name:
            yield PlainWeight(name.replace(".base_layer.", "."), [parameter])
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, nn.Parameter):  # such as the bias with which DeepSeek-V3 selects experts
            yield PlainWeight(name, [tensor])


class Engine:
    """The weights of a `TrainedModule` module, and the layout of its inputs.

    Args:
        model: Hugging Face causal language model, in any dtype; parameters that require gradient are trained.
    """

    _module: Any  # a `PolicyModule` or `ValueModule`, or what wraps it
    _model: Any  # the policy's Hugging Face causal language model; of a critic the `ValueModule`

    def __init__(self, model: Any, ranks: Ranks, **settings: Unpack[Settings]) -> None:
        self.ranks = ranks
        self._dtype = settings["dtype"]  # of forward and backward pass
        if backend := settings.get("compile_backend"):
            compile_layers(model, backend)
        if settings.get("gradient_checkpointing"):
            recompute_layers(model)

    def _wrapped(self, model: Any, **reading: Any) -> nn.Module:
        """The module to train, of the model on its device; `reading`: options of `BodyReader`."""
        raise NotImplementedError

    def _gathered(
        self, parts: Sequence[Tensor], *, changed: bool = False
    ) -> contextlib.AbstractContextManager[Sequence[Tensor]]:
        """Context of these tensors of `_model` in full, on every rank; `changed`: what it may change."""
        raise NotImplementedError

    def _ready(self) -> None:
        """Called before weights are read by name: those in `_model` must be what `_gathered` expects."""

    def plan(self, passes: Sequence[ModelInputs]) -> str:
        """See `TrainedModule.plan`."""
        reader: BodyReader = self._module.reader
        return reader.plan(passes)

    def _end_of_mini_batch(self) -> None:
        """Forgets the layout: a resumed run has none either, and one layout rounds otherwise than another."""
        self._module.reader.forget_plan()

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights` (may be a collective: all ranks iterate)."""
        self._ready()
        for weight in plain_weights(self._model, merged=merged):
            with self._gathered(weight.parts) as parts:
                full = replace(weight, parts=parts).value()
                yield weight.name, full.to(self._dtype) if isinstance(weight.parts[0], nn.Parameter) else full


class PolicyEngine(Engine):
    """A `TrainEngine` without what depends on how weights are divided. `temperature`: that of sampling."""

    def __init__(self, model: Any, ranks: Ranks, *, temperature: float, **settings: Unpack[Settings]) -> None:
        self._temperature = temperature
        self._sequence = settings.get("sequence")
        super().__init__(model, ranks, **settings)

    def _wrapped(self, model: Any, **reading: Any) -> PolicyModule:
        return PolicyModule(model, self._temperature, sequence=self._sequence, **reading)

    def policy(self, inputs: ModelInputs, **asked: bool) -> PolicyOutput:
        """See `TrainEngine.policy`."""
        output: PolicyOutput = self._module(inputs=inputs, **asked)
        return output

    def adapter(self) -> Adapter:
        """See `TrainEngine.adapter` (may be a collective); gathers only A and B."""
        self._ready()
        parameters = adapter_parameters(self._model)
        with self._gathered(list(parameters.values())) as parts:
            on_host = [part.detach().to("cpu", self._dtype, copy=True) for part in parts]
        return Adapter.of(self._model, dict(zip(parameters, on_host, strict=True)))

    def perturbed(
        self, bit: int, names: Collection[str] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """See `TrainEngine.perturbed` (may be a collective)."""
        return perturbed(self._model, bit, names, partial(self._gathered, changed=True), self._ready)

    @property
    def parts(self) -> dict[str, list[str]]:
        """See `TrainEngine.parts`."""
        return parts_of(self._model)

    def export(self, directory: Path, files: StateFiles | None = None) -> None:
        """See `TrainEngine.export`."""
        export(self._model, self.weights(), self.ranks, directory, files)


class ValueEngine(Engine):
    """A `CriticEngine` without what depends on how weights are divided.

    Raises:
        UsageError: the model has no body separate from its output head.
    """

    def _wrapped(self, model: Any, **reading: Any) -> ValueModule:
        return ValueModule(model, **reading)

    def values(self, inputs: ModelInputs) -> Tensor:
        """See `CriticEngine.values`."""
        values: Tensor = self._module(inputs=inputs)
        return values


class FrozenModule:
    """A `ListingPolicy` that runs a `PolicyModule`, or what wraps it, which is never trained."""

    _module: Any

    @torch.no_grad()
    def log_probs(self, inputs: ModelInputs) -> Tensor:
        """See `ReferencePolicy.log_probs`; the caller splits the batch into micro-batches."""
        log_probs: Tensor = self._module(inputs=inputs).log_probs
        return log_probs

    @torch.no_grad()
    def top_k(self, inputs: ModelInputs, count: int, vocabulary: int) -> Tensor:
        """See `ListingPolicy.top_k`."""
        output = self._module(inputs=inputs, top_k=(count, vocabulary))
        return torch.cat([output.log_probs[:, None], output.most_likely], 1)
