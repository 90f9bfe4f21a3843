"""What training engines have in common, whatever divides the weights among the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlctl.batch import ModelInputs
from rlctl.engine.layout import BodyReader
from rlctl.engine.log_probs import policy_output
from rlctl.engine.lora import Adapter, adapter_parameters, plain_weights
from rlctl.engine.model import export
from rlctl.engine.perturb import parts_of, perturbed
from rlctl.engine.protocol import PolicyOutput
from rlctl.engine.ranks import Ranks


class Engine:
    """The weights of a `Trained` module, and the layout of its inputs."""

    ranks: Ranks
    _dtype: torch.dtype  # of forward and backward pass
    _module: Any  # a `PolicyModule` or `ValueModule`, or what wraps it
    _model: Any  # the policy's Hugging Face causal language model; of a critic the `ValueModule`

    def _gathered(
        self, parts: Sequence[Tensor], *, changed: bool = False
    ) -> contextlib.AbstractContextManager[Sequence[Tensor]]:
        """Context of these tensors of `_model` in full, on every rank; `changed`: what it may change."""
        raise NotImplementedError

    def _ready(self) -> None:
        """Called before weights are read by name: those in `_model` must be what `_gathered` expects."""

    def plan(self, passes: Sequence[ModelInputs]) -> str:
        """See `Trained.plan`."""
        reader: BodyReader = self._module.reader
        return reader.plan(passes)

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights` (may be a collective: all ranks iterate)."""
        self._ready()
        for weight in plain_weights(self._model, merged=merged):
            with self._gathered(weight.parts) as parts:
                full = replace(weight, parts=parts).value()
                yield weight.name, full.to(self._dtype) if isinstance(weight.parts[0], nn.Parameter) else full


class PolicyEngine(Engine):
    """A `TrainEngine` without what depends on how weights are divided."""

    def policy(self, inputs: ModelInputs, **asked: bool) -> PolicyOutput:
        """See `TrainEngine.policy`."""
        return policy_output(self._module, inputs, **asked)

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

    def export(self, directory: Path) -> None:
        """See `TrainEngine.export`."""
        export(self._model, self.weights(), self.ranks, directory)


class ValueEngine(Engine):
    """A `CriticEngine` without what depends on how weights are divided."""

    def values(self, inputs: ModelInputs) -> Tensor:
        """See `CriticEngine.values`."""
        values: Tensor = self._module(inputs=inputs)
        return values


class FrozenModule:
    """A `Teacher` that runs a `PolicyModule`, or what wraps it, which is never trained."""

    _module: Any

    @torch.no_grad()
    def log_probs(self, inputs: ModelInputs) -> Tensor:
        """See `ReferencePolicy.log_probs`; the caller splits the batch into micro-batches."""
        return policy_output(self._module, inputs).log_probs

    @torch.no_grad()
    def top_k(self, inputs: ModelInputs, count: int, vocabulary: int) -> Tensor:
        """See `Teacher.top_k`."""
        log_probs, _, listed = self._module(inputs=inputs, top_k=(count, vocabulary))
        return torch.cat([log_probs[:, None], listed], 1)
