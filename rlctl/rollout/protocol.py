"""Between the trainer and rollout engines: interfaces, seeds, complete weights, one engine for two threads.

Imports no torch, because the spec loads it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from rlctl.batch import FINISH_REASONS, Turn
from rlctl.errors import RunFailure, UsageError
from rlctl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

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


# --- weights ----------------------------------------------------------------------------------------


#: Text models that vLLM gives no output head: it applies their embedding.
_WITHOUT_HEAD = ("gemma2", "gemma3n_text")


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """A `Policy` without adapters.

    Attributes:
        named_tensors: all weights, by their names in the model's `state_dict()`.
    """

    named_tensors: Iterable[tuple[str, Tensor]]

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.weights`; `merged` has no effect."""
        del merged
        return iter(self.named_tensors)

    def adapter(self) -> NoReturn:
        """Not supported.

        Raises:
            ValueError: always.
        """
        raise ValueError("these weights have no adapter")


def _as_saved(model: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Returns a function that converts a weight of the model to the form `save_pretrained` would write."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return lambda weight: weight
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # the model was not loaded from files
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions or any(len(each.target_patterns) > 1 for each in conversions):
        return lambda weight: weight  # a file's weight combines several of the model's: unsupported
    return partial(revert_weight_conversion, model)


class ExpectedWeights:
    """Names and shapes of a complete set of a model's weights; tied names are one weight.

    Args:
        model: a Hugging Face model, not yet wrapped by a training engine; its weights may be partitioned.
    """

    def __init__(self, model: Any) -> None:
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        names: dict[int, list[str]] = {}
        for name, tensor in state.items():
            names.setdefault(id(tensor), []).append(name)
        # `ds_shape`: DeepSpeed's full shape of a weight that is partitioned among the ranks.
        self._shapes = {name: tuple(getattr(part, "ds_shape", part.shape)) for name, part in state.items()}
        self._names = {name: tuple(names[id(tensor)]) for name, tensor in state.items()}
        self._as_saved = _as_saved(model)
        config = getattr(model, "config", None)
        self._has_head = config is None or config.get_text_config().model_type not in _WITHOUT_HEAD

    def in_files(
        self, named_tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Like `checked`, but with the names and tensors of the model's files, which engines load.

        In memory, transformers may represent a model differently: experts in one tensor, modules renamed.
        Tied weights have the first of their names only, as in files. On CPUs they have all names, because
        engines run them untied, see `rlctl.rollout.vllm`; except if vLLM's model has no head.
        """
        most = 1 if torch.cuda.is_available() or not self._has_head else None
        for names, tensor in self.checked(named_tensors):
            first, *tied = [self._as_saved({name: tensor}) for name in names[:most]]
            for name, part in first.items():
                yield (name, *(next(iter(other)) for other in tied)), part

    def checked(
        self, named_tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yields each correct weight with all its names; raises one error for all others at the end.

        Raises:
            RunFailure: a weight is missing, unknown or of another shape. The correct ones have been yielded
                by then, so an engine that loaded them has a mixture of old and new weights.
        """
        covered: set[str] = set()
        wrong: list[str] = []
        for name, tensor in named_tensors:
            shape = self._shapes.get(name)
            if shape is None:
                wrong.append(f"{name} is unknown")
            elif shape != tuple(tensor.shape):
                wrong.append(f"{name} has shape {tuple(tensor.shape)} instead of {shape}")
            else:
                covered.update(self._names[name])
                yield self._names[name], tensor
        wrong += [f"{name} is missing" for name in self._shapes if name not in covered]
        if wrong:
            raise RunFailure(f"weight sync to the rollout engine failed: {'; '.join(wrong)}")


# --- one engine for two threads ---------------------------------------------------------------------


class EngineLock:
    """Lock of an engine used by the trainer's thread, which has priority, and one that samples ahead."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self._num_trainers = 0  # waiting

    @contextlib.contextmanager
    def held(self, *, first: bool) -> Iterator[None]:
        """Holds the engine; `first`: with priority over threads that wait without it."""
        with self._changed:
            self._num_trainers += first
            self._changed.wait_for(lambda: not self._is_taken and (first or not self._num_trainers))
            self._num_trainers -= first
            self._is_taken = True
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()


class LockedRollout:
    """A `RolloutEngine` shared by threads.

    Args:
        engine: used by one thread at a time.
        lock: shared by all wrappers of the engine.
        first: whether this is the trainer's wrapper, which waits for at most one batch.
        offloadable: `offload` moves it off the device before each use of the engine, `onload` back; or None.
    """

    def __init__(
        self, engine: RolloutEngine, lock: EngineLock, *, first: bool, offloadable: Any = None
    ) -> None:
        self._engine, self._lock, self._first = engine, lock, first
        self._offloadable = offloadable

    @property
    def shares_device(self) -> bool:
        """Whether engine and trainer are never on the device at the same time."""
        return self._offloadable is not None

    @property
    def sleeping_bytes(self) -> int:
        """GPU memory that the engine frees while it sleeps, and that torch counts as allocated."""
        return int(getattr(self._engine, "sleeping_bytes", 0))

    @property
    def num_repeated(self) -> int:
        """Number of requests so far that the engine repeated."""
        return int(getattr(self._engine, "num_repeated", 0))

    @property
    def description(self) -> str:
        """The engine's description for the record of a run; its class name if it has none."""
        return str(getattr(self._engine, "description", type(self._engine).__name__))

    @property
    def notes(self) -> list[str]:
        """The engine's messages to the user, if any."""
        return list(getattr(self._engine, "notes", []))

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """See `ResponseSampler.sample`; also checks the result.

        Raises:
            RunFailure: the engine does not return one valid turn per request.
        """
        with self._in_use():
            return _checked(self._engine, self._engine.sample(requests, sampling), requests, sampling)

    def each(self) -> list[tuple[str, LockedRollout]]:
        """Every replica by its name, to sample with it alone; `""`: the engine, which has none."""
        each: dict[str, Any] = getattr(self._engine, "each", dict)()
        found = [(name, copy.copy(self)) for name in each] or [("", self)]
        for name, replica in found:
            replica._engine = each.get(name, self._engine)
        return found

    def finish(self) -> None:
        """Declares that this rank has no further requests for now.

        If ranks share an engine, processes the other ranks' requests until every rank has finished. Must be
        called wherever ranks may make different numbers of requests.
        """
        if finish := getattr(self._engine, "finish", None):
            with self._in_use():
                finish()

    def release(self, *, weights_follow: bool) -> None:
        """Frees the engine's memory, if it supports that, after the last sampling of a step."""
        if release := getattr(self._engine, "release", None):
            with self._lock.held(first=self._first):
                release(weights_follow=weights_follow)
        if self._offloadable:
            self._offloadable.onload()

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """See `RolloutEngine.sync_weights`; no batch is sampled from a mixture of weights."""
        with self._in_use():
            self._engine.sync_weights(policy, policy_version)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._lock.held(first=self._first):
            if self._offloadable:
                self._offloadable.offload()
            yield

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        with self._lock.held(first=self._first):
            self._engine.close()


class InFlightRollout:
    """Samples for any number of threads at once, also while the engine's weights are updated.

    Args:
        engine: `EngineCapabilities.samples_in_flight` has its mode.
    """

    #: requests of one call need not wait for each other
    is_concurrent = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """See `LockedRollout.sample`; a turn may have tokens of several versions."""
        turns = self._engine.sample_in_flight(requests, sampling)
        return _checked(self._engine, turns, requests, sampling)

    def finish(self) -> None:
        """Does nothing: no rank waits for another one's requests."""

    def close(self) -> None:
        """Ends open requests: every `sample` fails."""
        self._engine.cancel_requests()


def _checked(engine: Any, turns: Any, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
    if what := wrong_turns(turns, len(requests), sampling):
        raise RunFailure(f"{type(engine).__name__}.sample returned {what}", where="rollout.name")
    found: list[Turn] = turns
    return found


def wrong_turns(turns: Any, count: int, sampling: Sampling) -> str:
    """What is wrong with the result of an engine for `count` requests; empty: nothing."""
    if not isinstance(turns, list) or len(turns) != count:
        size = f" of {len(turns)}" if isinstance(turns, list) else ""
        return f"{type(turns).__name__}{size} instead of a list of {count} turns"
    dtypes = {"token_ids": torch.int64, "log_probs": torch.float32, "versions": torch.int64}
    asked = {"kept": sampling.with_kept, "most_likely": sampling.num_most_likely > 0}
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Turn):
            return f"{type(turn).__name__} instead of turn {number}"
        shape = (len(turn.token_ids),)
        for name, dtype in dtypes.items():
            values = getattr(turn, name)
            if (tuple(values.shape), values.dtype, values.device.type) != (shape, dtype, "cpu"):
                found = f"{name} of turn {number} of shape {tuple(values.shape)} and type {values.dtype}"
                return f"{found} on {values.device}, instead of {shape}, {dtype}, on the CPU"
        asked["experts"] = sampling.with_experts and turn.finish_reason != "abort"
        for name, is_asked in asked.items():
            lists, count = getattr(turn, name), shape[0]
            # Experts are those of all tokens that were read, not of the turn's last one.
            least, most = (count - 1, math.inf) if name == "experts" else (count, count)
            if is_asked and (lists is None or not least <= len(lists) <= most):
                return f"no list for each of the {len(turn.token_ids)} tokens in {name} of turn {number}"
        if turn.finish_reason not in FINISH_REASONS:
            return f"finish_reason {turn.finish_reason!r} of turn {number}; it is one of {FINISH_REASONS}"
    return ""
