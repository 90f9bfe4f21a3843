"""What training engines have in common, whatever divides the weights among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.batch import ModelInputs
from rlctl.engine.log_probs import policy_output, top_k_output
from rlctl.engine.model import export
from rlctl.engine.perturb import parts_of
from rlctl.engine.protocol import PolicyOutput
from rlctl.engine.ranks import Ranks


class PolicyEngine:
    """A `TrainEngine` without what depends on how weights are divided."""

    ranks: Ranks
    _module: Any  # a `PolicyModule`, or what wraps it
    _model: Any  # its Hugging Face causal language model
    _in_full: Callable[..., Iterator[tuple[str, Tensor]]]  # plain weights of a model by name

    def policy(self, inputs: ModelInputs, **asked: bool) -> PolicyOutput:
        """See `TrainEngine.policy`."""
        return policy_output(self._module, inputs, **asked)

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights` (may be a collective: all ranks iterate)."""
        return self._in_full(self._model, merged=merged)

    @property
    def parts(self) -> dict[str, list[str]]:
        """See `TrainEngine.parts`."""
        return parts_of(self._model)

    def export(self, directory: Path) -> None:
        """See `TrainEngine.export`."""
        export(self._model, self.weights(), self.ranks, directory)


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
        return top_k_output(self._module, inputs, count, vocabulary)
