"""Between the trainer and rollout engines: what is asked of an engine, and what it offers.

What every engine must have is in `RolloutEngine`; what it must return, in `ResponseSampler.sample`. Engines
are found by name in `rlctl.rollout.engines`, a user's too; `EngineCapabilities` declares what one can report.

Imports no torch, because the spec loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlctl.batch import Turn
from rlctl.capabilities.sections import sections_on
from rlctl.errors import RunFailure, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlctl.run_spec.run_spec import RunSpec


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

    @property
    def asks_for(self) -> dict[str, bool]:
        """Fields of a turn with an entry per token, and whether they are asked for."""
        return {
            "kept": self.with_kept,
            "most_likely": self.num_most_likely > 0,
            "experts": self.with_experts,
        }


def sampling_of(spec: RunSpec) -> Sampling:
    """Sampling settings of the training responses."""
    rollout = spec.rollout
    asked: dict[str, Any] = {}
    for section in sections_on(spec).values():
        asked |= section.asks_of_sampler(spec)
    return Sampling(
        max_response_length=spec.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        with_kept=rollout.exact_sampling,
        **asked,
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


@dataclass(frozen=True, slots=True)
class Requests(Sequence[Request]):
    """R calls of an engine as columns; a `Request` is made when an engine asks for it."""

    token_ids: Sequence[Sequence[int]]
    seeds: Sequence[int]
    max_tokens: Sequence[int | None]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Requests:
        """The columns of these requests."""
        if isinstance(requests, Requests):
            return requests
        return cls(
            token_ids=[request.token_ids for request in requests],
            seeds=[request.seed for request in requests],
            max_tokens=[request.max_tokens for request in requests],
        )

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: Any) -> Any:
        """The request at this place, or those of a slice."""
        make: Any = Requests if isinstance(index, slice) else Request
        return make(self.token_ids[index], self.seeds[index], self.max_tokens[index])

    def __iter__(self) -> Iterator[Request]:
        return map(Request, self.token_ids, self.seeds, self.max_tokens)

    def limits(self, sampling: Sampling) -> list[int]:
        """(R,) see `Request.limit`."""
        return [sampling.max_response_length if limit is None else limit for limit in self.max_tokens]


class ResponseSampler(Protocol):
    """Samples from a model."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Sequence[Turn]:
        """One turn per request, in order, on the CPU: a list, or the columns of all turns at once, `Turns`.

        A `Turn` has the sampled tokens, their log-probs under the distribution that `sampling` describes, and
        the version of the weights that sampled each; besides, what `sampling` asks for (`asks_for`). A turn
        that is none of this is refused (`rlctl.rollout.turn_checks`): other types, shapes or numbers, more
        tokens than `Request.limit`, a log-prob above 0. Requests with the same tokens should be
        adjacent, because an engine may compute these once.

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


# --- what an engine may offer beside these: one that has the method -----------------------------------


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine says of itself.

    Attributes:
        description: for the record of a run; empty: its class name.
        notes: messages to the user.
        num_repeated: number of requests so far that it repeated.
        sleeping_bytes: GPU memory that it frees while it sleeps, and that torch counts as allocated.
    """

    description: str = ""
    notes: tuple[str, ...] = ()
    num_repeated: int = 0
    sleeping_bytes: int = 0


@runtime_checkable
class ReportingEngine(Protocol):
    """An engine that says something of itself."""

    def report(self) -> EngineReport:
        """As of now."""


class InFlightEngine(RolloutEngine, Protocol):
    """An engine for `rollout.in_flight`, see `EngineCapabilities.samples_in_flight`."""

    def sample_in_flight(self, requests: Sequence[Request], sampling: Sampling) -> Sequence[Turn]:
        """As `sample`, for any number of threads at once, also during `sync_weights`.

        A turn may have tokens of several versions.
        """

    def cancel_requests(self) -> None:
        """Ends open requests, and refuses later ones: each `sample_in_flight` fails."""


@runtime_checkable
class ReplicatedEngine(Protocol):
    """An engine of several replicas, such as servers."""

    def each(self) -> Mapping[str, RolloutEngine]:
        """Its replicas by name, to sample with one alone."""


@runtime_checkable
class EngineOfRanks(Protocol):
    """An engine that several ranks share."""

    def finish(self) -> None:
        """This rank has no requests for now: processes the others' until every rank has finished."""


@runtime_checkable
class ReleasingEngine(Protocol):
    """An engine that frees its memory while it is not used."""

    def release(self, *, weights_follow: bool) -> None:
        """Frees it after the last sampling of a step; `weights_follow`: new weights come next."""


# --- what an environment may find beside a sampler, which is no engine then ----------------------------


@runtime_checkable
class ConcurrentSampler(Protocol):
    """A sampler that several threads may use at once, if `is_concurrent` (`InFlightRollout`)."""

    is_concurrent: bool


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


def end_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """Ids of all tokens that end a response: those of the tokenizer and of the model's generation config.

    Raises:
        UsageError: there is none.
    """
    ids: dict[int, None] = {}  # an ordered set
    for named in (tokenizer.eos_token_id, generation_config.eos_token_id):
        if named is not None:
            ids.update(dict.fromkeys([named] if isinstance(named, int) else named))
    if not ids:
        raise UsageError(
            "neither the tokenizer nor the model's generation config names an end-of-sequence token",
            fix="set eos_token in tokenizer_config.json",
        )
    return list(ids)
