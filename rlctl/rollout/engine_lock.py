"""Lock for an engine used by two threads: the trainer's has priority over the one that samples ahead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlctl.batch import FINISH_REASONS, Turn
from rlctl.errors import RunFailure
from rlctl.rollout.protocol import Policy, Request, RolloutEngine, Sampling

#: (t,) field of `Turn` → its type.
_DTYPES = {"token_ids": torch.int64, "log_probs": torch.float32, "versions": torch.int64}


class EngineLock:
    """Mutual exclusion for an engine. A waiting trainer thread acquires it before any other thread."""

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
    asked = {"kept": sampling.with_kept, "most_likely": sampling.num_most_likely > 0}
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Turn):
            return f"{type(turn).__name__} instead of turn {number}"
        shape = (len(turn.token_ids),)
        for name, dtype in _DTYPES.items():
            values = getattr(turn, name)
            if (tuple(values.shape), values.dtype, values.device.type) != (shape, dtype, "cpu"):
                found = f"{name} of turn {number} of shape {tuple(values.shape)} and type {values.dtype}"
                return f"{found} on {values.device}, instead of {shape}, {dtype}, on the CPU"
        for name, is_asked in asked.items():
            lists = getattr(turn, name)
            if is_asked and (lists is None or len(lists) != len(turn.token_ids)):
                return f"no list for each of the {len(turn.token_ids)} tokens in {name} of turn {number}"
        if turn.finish_reason not in FINISH_REASONS:
            return f"finish_reason {turn.finish_reason!r} of turn {number}; it is one of {FINISH_REASONS}"
    return ""
