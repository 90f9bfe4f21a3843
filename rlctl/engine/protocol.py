"""What the trainer asks of a training engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.batch import ModelInputs


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """What the policy says of the sampled tokens.

    Attributes:
        log_probs: (B, T) float32 at the sampling temperature, 0.0 on padding; carries gradient
            unless grad is disabled.
        entropy: (B, T) float32 of the next-token distribution, nats, 0.0 on padding; carries
            gradient only where asked for.
        sum_pi_squared: (B, T) float32, Σ_v π(v)² of the same distribution in (0, 1], detached, 0.0
            on padding; None unless asked for.
        sketch: (N, K) float32, detached: sketches of ∇ log π in the output head, of the N scored tokens in
            row order; None unless asked for.
    """

    log_probs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor | None = None
    sketch: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an optimizer step did.

    Attributes:
        grad_norm: global gradient norm before clipping.
        applied: False when the update was withheld (asked to skip, or a non-finite gradient).
    """

    grad_norm: float
    applied: bool


class AdapterSnapshot(Protocol):
    """A LoRA adapter's values at one moment."""

    def save(self, directory: Path) -> None:
        """Write it in PEFT's format."""
        ...


class Trained(Protocol):
    """What actor and critic have in common: backward, step, save.

    Attributes:
        zero_stage: the one in effect, by which checkpoints are cut up.
        scales_gradients: `step` takes a `grad_scale`.
    """

    zero_stage: int
    scales_gradients: bool

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro-batch's gradient; `last` closes the mini-batch.

        `loss` is this rank's and this micro-batch's **share** of the mini-batch loss: the shares of
        all micro-batches on all ranks add up to it, and so do the gradients.
        """
        ...

    def step(self, *, lr: float, skip: bool = False, grad_scale: float = 1.0) -> StepResult:
        """Apply (or, with `skip`, discard) the accumulated gradient, multiplied by `grad_scale`."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in full, by the model's own name, on every rank."""
        ...

    def save(self, directory: Path) -> dict[str, str]:
        """Write everything `load` needs; called on all ranks.

        Returns:
            File below `directory` → its SHA-256, of those that this rank hashed while it wrote them.
        """
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; called on all ranks.

        Raises:
            RunFailure: the engine's state cannot be read.
        """
        ...


class TrainEngine(Trained, Protocol):
    """A policy under training."""

    def policy(
        self,
        inputs: ModelInputs,
        *,
        entropy_grad: bool = False,
        sum_pi_squared: bool = False,
        sketch: bool = False,
    ) -> PolicyOutput:
        """Log-probs and entropy of the scored tokens.

        Args:
            inputs: any number of rows.
            entropy_grad: let gradient through the entropy, for a bonus on it.
            sum_pi_squared: also compute Σ_v π(v)².
            sketch: also sketch the gradient of each log-prob in the output head.

        Raises:
            UsageError: a sketch is asked of a model without an output head of its own.
        """
        ...

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in full, by the model's own name, on every rank.

        Under LoRA these are the names without adapters, and the weights with what the adapters have
        learnt added in; unless `merged`, the frozen ones below them.
        """
        ...

    def adapter(self) -> AdapterSnapshot:
        """Under LoRA: A and B in full, on every rank."""
        ...

    def export(self, directory: Path) -> None:
        """Write config and weights as a plain Hugging Face directory; called on all ranks."""
        ...


class CriticEngine(Trained, Protocol):
    """A value model under training."""

    def values(self, inputs: ModelInputs) -> Tensor:
        """(B, T) float32 with gradient: the value before token t is sampled, 0.0 on padding."""
        ...


class ReferencePolicy(Protocol):
    """A policy that does not change."""

    def log_probs(self, inputs: ModelInputs) -> Tensor:
        """(B, T) float32 of the scored tokens at the sampling temperature, 0.0 elsewhere."""
        ...
