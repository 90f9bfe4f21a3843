"""Interface of the training engines."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.batch import ModelInputs
    from rlctl.engine.state_files import StateFiles


class PolicyOutput(NamedTuple):
    """Output of the policy for the M scored tokens, in order.

    Attributes:
        log_probs: (M,) float32 at the sampling temperature; carries gradient unless grad is disabled.
        entropy: (M,) float32 of the next-token distribution, nats; carries gradient only on request.
        sum_pi_squared: (M,) float32, Σ_v π(v)² of the same distribution in (0, 1], detached; None unless
            requested.
        most_likely: (M, K) float32, log-probs of `ModelInputs.most_likely`, padded as by
            `TokenLists.padded`; carries gradient as `log_probs` does. (M, K + 1) if the log-probs of all
            other tokens together were requested. None: no lists. For `top_k`, see `ListingPolicy.top_k`.
        routing: (M, 2·E) float32, for each scored token the router's probability of each expert, with
            gradient, and the share of layers that chose it, without; means over layers. None unless
            requested.
    """

    log_probs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor | None = None
    most_likely: Tensor | None = None
    routing: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of an optimizer step.

    Attributes:
        grad_norm: global gradient norm before clipping.
        applied: False if the update was withheld (`skip`, or a non-finite gradient).
    """

    grad_norm: float
    applied: bool


class TrainedModule(Protocol):
    """Common interface of actor and critic: backward, step, save.

    Attributes:
        scales_gradients: whether `step` supports `grad_scale`.
    """

    scales_gradients: bool

    @property
    def holds_state(self) -> bool:
        """Whether all that `save` writes and training changes can be held in memory (`HeldFiles`).

        An engine of a user's own that lacks it writes at once: its `save` and `export` get no `files`.
        """

    def plan(self, passes: Sequence[ModelInputs]) -> str:
        """Chooses how the model reads these inputs, the passes of a mini-batch; called on all ranks.

        The choice holds for all passes of this engine until `step`. Without a call each pass chooses.

        Returns:
            The choice in words, the same on every rank.
        """

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds this micro-batch's gradient; `last` marks the last micro-batch of the mini-batch.

        `loss` is this rank's and this micro-batch's **share** of the mini-batch loss: the shares of
        all micro-batches on all ranks sum to the loss, and their gradients to its gradient.
        """

    def step(self, *, lr: float, skip: bool = False, grad_scale: float = 1.0) -> StepResult:
        """Applies (or, with `skip`, discards) the accumulated gradient, multiplied by `grad_scale`."""

    def save(self, directory: Path, files: StateFiles | None = None) -> None:
        """Writes everything that `load` needs; called on all ranks.

        Args:
            files: how the files are written that this rank alone writes; None: at once.
        """

    def load(self, directory: Path) -> None:
        """Restores what `save` wrote; called on all ranks.

        Raises:
            RunFailure: the engine's state cannot be read.
        """


class TrainEngine(TrainedModule, Protocol):
    """A policy under training."""

    def policy(
        self,
        inputs: ModelInputs,
        *,
        entropy_grad: bool = False,
        sum_pi_squared: bool = False,
        tail: bool = False,
        routing: bool = False,
    ) -> PolicyOutput:
        """Log-probs and entropy of the scored tokens.

        Args:
            entropy_grad: compute the entropy with gradient, for an entropy bonus.
            sum_pi_squared: also compute Σ_v π(v)².
            tail: also compute the log-probs of all tokens that are not in `inputs.most_likely`, of which
                every place must have K.
            routing: also return the routing of tokens to experts.
        """

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and every buffer that is saved, in full, by the model's own name, on every rank.

        With LoRA, names are those of the model without adapters. Values include the adapters if
        `merged`; otherwise they are the frozen weights.
        """

    def adapter(self) -> Any:
        """With LoRA: A and B in full, on every rank, as an `Adapter` of `rlctl.engine.lora`."""

    @property
    def parts(self) -> dict[str, list[str]]:
        """Names of the trained parameters, by the part of the model, such as `q_proj`."""

    def perturbed(
        self, bit: int, names: Collection[str] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Context in which each trained weight differs by about 2^−bit of itself; then all are as before.

        Args:
            bit: 1 to 7.
            names: the parameters to change; None: all.
        """

    def export(self, directory: Path, files: StateFiles | None = None) -> None:
        """Writes config and weights as a plain Hugging Face directory; called on all ranks.

        Args:
            files: as in `save`.
        """


class CriticEngine(TrainedModule, Protocol):
    """A value model under training."""

    def values(self, inputs: ModelInputs) -> Tensor:
        """(M,) float32 with gradient: value of the state before each scored token is sampled."""


class ReferencePolicy(Protocol):
    """A policy that is not trained, such as the reference of a KL penalty."""

    def log_probs(self, inputs: ModelInputs) -> Tensor:
        """(M,) float32 of the scored tokens at the sampling temperature."""


class ListingPolicy(ReferencePolicy, Protocol):
    """Such a policy that also lists the tokens that it finds most likely."""

    def top_k(self, inputs: ModelInputs, count: int, vocabulary: int) -> Tensor:
        """(M, 2K + 2) float32: log-prob of the scored token, as `log_probs`; those of the K = `count` most
        likely of the first `vocabulary` tokens, and of all other tokens together; the K tokens.
        """
