"""What the trainer asks of whatever samples responses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from rlctl.batch import KeptTokens, Prompts, Rollouts


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution responses are drawn from.

    Attributes:
        max_response_length: tokens sampled at most, end of sequence included.
        temperature: divides the logits, > 0.
        top_p: keep the likeliest tokens that make up this mass; 1: all.
        top_k: keep the k likeliest tokens; -1: all.
        min_p: drop tokens below this share of the likeliest one's probability; 0: none.
        greedy: take the likeliest token instead of drawing one. The log-probs reported are still
            those of the distribution described above.
        with_kept: also report the tokens that top_k, top_p and min_p left, see `KeptTokens`.
    """

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    greedy: bool = False
    with_kept: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an engine sampled, before it becomes `Rollouts`: B responses of up to T tokens.

    Attributes:
        tokens: (B, T) int64; after its length a row may hold anything.
        log_probs: (B, T) float32 of these tokens under the distribution sampled from.
        lengths: (B,) int64 tokens the policy sampled, end of sequence included; the engine knows, nobody
            searches the tokens for an end.
        finish_reason: (B,) int8, places in `rlctl.batch.FINISH_REASONS`.
        kept: what each token was drawn from, where `Sampling.with_kept` asks for it.
    """

    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor
    finish_reason: Tensor
    kept: KeptTokens | None = None


class ResponseSampler(Protocol):
    """Samples responses from a model."""

    def generate(
        self, prompts: Prompts, sampling: Sampling, *, n: int, step_seed: int, num_groups_total: int
    ) -> Rollouts:
        """Sample n responses per prompt; those of prompt i are rows i·n … i·n + n − 1.

        The same `step_seed` gives the same responses, however the batch is spread over ranks: what a
        row draws depends on its prompt's `group_ids` and its place among its siblings only.

        Args:
            prompts: this rank's share, N prompts.
            sampling: the distribution to draw from.
            n: responses per prompt.
            step_seed: see `step_seed`.
            num_groups_total: prompts in the batch over all ranks; every group id is below it.

        Raises:
            RunFailure: the last weight sync did not finish, so the weights are a mixture.
        """
        ...


class SavedAdapter(Protocol):
    """A LoRA adapter's values at one moment."""

    def save(self, directory: Path) -> None:
        """Write it in PEFT's format."""
        ...


class Policy(Protocol):
    """What an engine may ask of the policy under training.

    Every rank must ask for the same things in the same order, and take all that comes: weights may
    be cut up among the ranks.
    """

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Every weight in full, by the names of the model's `state_dict()`.

        Args:
            merged: with what adapters have learnt added in; otherwise the frozen ones below them.
        """
        ...

    def adapter(self) -> SavedAdapter:
        """What adapters have learnt, apart."""
        ...


class RolloutEngine(ResponseSampler, Protocol):
    """Samples responses from its own copy of the policy, which training keeps up to date."""

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """Take over what the policy has learnt: all weights, or its adapter alone.

        Raises:
            RunFailure: a parameter is missing, unknown or of another shape (all are named), or the
                engine did not take them.
            UsageError: the engine cannot run this adapter.
        """
        ...

    def close(self) -> None:
        """End the engine and give its memory back."""
        ...


def step_seed(seed: int, step: int, purpose: str = "train") -> int:
    """An unrelated 63-bit seed for every step of every purpose of a run."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
