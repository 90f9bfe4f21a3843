"""One rollout engine for two threads, the trainer's and one that samples ahead, or for any number of them."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlctl.episodes import Turns
from rlctl.rollout.protocol import (
    EngineOfRanks,
    EngineReport,
    InFlightEngine,
    Policy,
    ReleasingEngine,
    ReplicatedEngine,
    ReportingEngine,
    Request,
    RolloutEngine,
    Sampling,
)
from rlctl.rollout.turn_checks import checked_turns


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
        self._engine = engine
        self._lock = lock
        self._first = first
        self._offloadable = offloadable

    @property
    def shares_device(self) -> bool:
        """Whether engine and trainer are never on the device at the same time."""
        return self._offloadable is not None

    def report(self) -> EngineReport:
        """What the engine says of itself; its description is its class name if it has none."""
        report = self._engine.report() if isinstance(self._engine, ReportingEngine) else EngineReport()
        return report if report.description else replace(report, description=type(self._engine).__name__)

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Turns:
        """See `ResponseSampler.sample`; also checks the result.

        Raises:
            RunFailure: the engine does not return one valid turn per request.
        """
        with self._in_use():
            return checked_turns(self._engine, self._engine.sample(requests, sampling), requests, sampling)

    def each(self) -> list[tuple[str, LockedRollout]]:
        """Every replica by its name, to sample with it alone; `""`: the engine, which has none."""
        if not isinstance(self._engine, ReplicatedEngine):
            return [("", self)]
        replicas = []
        for name, engine in self._engine.each().items():
            replica = copy.copy(self)
            replica._engine = engine
            replicas.append((name, replica))
        return replicas or [("", self)]

    def finish(self) -> None:
        """Declares that this rank has no further requests for now.

        If ranks share an engine, processes the other ranks' requests until every rank has finished. Must be
        called wherever ranks may make different numbers of requests.
        """
        if isinstance(self._engine, EngineOfRanks):
            with self._in_use():
                self._engine.finish()

    def release(self, *, weights_follow: bool) -> None:
        """Frees the engine's memory, if it supports that, after the last sampling of a step."""
        if isinstance(self._engine, ReleasingEngine):
            with self._lock.held(first=self._first):
                self._engine.release(weights_follow=weights_follow)
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

    def __init__(self, engine: InFlightEngine) -> None:
        self._engine = engine

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Turns:
        """See `LockedRollout.sample`; a turn may have tokens of several versions."""
        turns = self._engine.sample_in_flight(requests, sampling)
        return checked_turns(self._engine, turns, requests, sampling)

    def finish(self) -> None:
        """Does nothing: no rank waits for another one's requests."""

    def close(self) -> None:
        """Ends open requests: every `sample` fails."""
        self._engine.cancel_requests()
