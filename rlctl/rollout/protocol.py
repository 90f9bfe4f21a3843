"""Interfaces between the trainer and rollout engines. Imports no torch, because the spec loads it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlctl.errors import RunFailure

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlctl.batch import Turn
    from rlctl.spec.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that responses are sampled from.

    Attributes:
        max_response_length: maximum number of sampled tokens, including end of sequence.
        temperature: divides the logits, > 0.
        top_p: keep the most likely tokens that make up this probability mass; 1: all.
        top_k: keep the k most likely tokens; -1: all.
        min_p: drop tokens whose probability is below this fraction of the highest one; 0: none.
        greedy: take the most likely token instead of sampling one. The log-probs reported are still
            those of the distribution described above.
        with_kept: also report the tokens that top_k, top_p and min_p keep, see `TokenLists`.
        num_most_likely: also report this many of the most likely tokens and their log-probs.
        with_experts: also report the experts that computed each token, see `Turn.experts`.
    """

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    greedy: bool = False
    with_kept: bool = False
    num_most_likely: int = 0
    with_experts: bool = False


def sampling_of(spec: RunSpec) -> Sampling:
    """Sampling settings of the training responses."""
    rollout = spec.rollout
    return Sampling(
        max_response_length=spec.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        with_kept=rollout.exact_sampling,
        num_most_likely=spec.algorithm.rollout_correction.score_centering or 0,
        with_experts=spec.actor.routing_replay,
    )


@dataclass(frozen=True, slots=True)
class Request:
    """A call of an engine: the tokens so far, and the seed of the random numbers of what follows them.

    Attributes:
        token_ids: tokens so far, at least one.
        seed: the same seed gives the same tokens, whatever else is sampled at the same time.
        max_tokens: limit of this turn; None: `Sampling.max_response_length`.
    """

    token_ids: Sequence[int]
    seed: int
    max_tokens: int | None = None

    def limit(self, sampling: Sampling) -> int:
        """Maximum number of tokens of this turn."""
        return sampling.max_response_length if self.max_tokens is None else self.max_tokens


class ResponseSampler(Protocol):
    """Samples from a model."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """One turn per request, in order, on the CPU.

        Requests with the same tokens should be adjacent, because an engine may compute these once.

        Raises:
            RunFailure: the last weight sync did not finish, so old and new weights are mixed.
        """


class SavedAdapter(Protocol):
    """A snapshot of a LoRA adapter."""

    def save(self, directory: Path) -> None:
        """Writes it in PEFT's format."""


class Policy(Protocol):
    """Interface through which an engine reads the policy under training.

    Every rank must make the same calls in the same order and consume the iterators completely, because
    weights may be partitioned among the ranks.
    """

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields every weight in full, by its name in the model's `state_dict()`.

        Args:
            merged: with the adapters merged in; otherwise the frozen base weights.
        """

    def adapter(self) -> SavedAdapter:
        """The adapter's weights, separate from the base."""


class RolloutEngine(ResponseSampler, Protocol):
    """Samples responses from its own copy of the policy, which the trainer keeps up to date."""

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """Updates the engine's copy from the policy: all weights, or its adapter only.

        Raises:
            RunFailure: a parameter is missing, unknown or of another shape (the message lists all), or the
                engine did not accept them.
            UsageError: the engine cannot run this adapter.
        """

    def close(self) -> None:
        """Stops the engine and frees its memory."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Inputs from which a rollout engine is built, on one rank.

    Attributes:
        model_path: directory or hub id of the policy.
        model: the policy, not yet wrapped by the training engine; an engine that keeps it must copy it. Under
            ZeRO-3 its weights are partitioned among the ranks (`ds_shape` is the full shape) unless the
            engine starts with the policy. None: the engine reads the weights of `model_path`, see
            `EngineCapabilities.reads_model_files`.
        device: device of the policy.
        rank, world_size: rank of this process and number of ranks; rank 0 is the main one.
        agree: returns on every rank the first text among all ranks' that is not empty (a collective).
        run_dir: directory of the run; outside training a temporary one.
        params: `rollout.engine_params`, validated by the engine's parameter class; None: it has none.
    """

    spec: RunSpec
    model_path: str
    model: Any
    tokenizer: Any
    device: torch.device
    rank: int
    world_size: int
    agree: Callable[[str], str]
    run_dir: Path
    params: Any = None


def synced(policy_version: int | None) -> int:
    """Returns the version of an engine's weights.

    Raises:
        RunFailure: it is None, because the last weight sync did not finish.
    """
    if policy_version is None:
        raise RunFailure("the last weight sync to the rollout engine failed: it holds old and new weights")
    return policy_version


def step_seed(seed: int, step: int, purpose: str = "train") -> int:
    """An independent 63-bit seed for every step and purpose of a run."""
    return derived_seed(seed, step, purpose)


def turn_seed(step_seed: int, group: int, member: int, turn: int = 0) -> int:
    """The seed of one turn of one episode; the same for any distribution of the batch over ranks."""
    return derived_seed(step_seed, group, member, turn)


def derived_seed(*parts: int | str) -> int:
    """An independent 63-bit seed for every combination of `parts`."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
