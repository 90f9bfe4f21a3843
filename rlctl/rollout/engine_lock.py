"""One rollout engine, two threads: the one that samples ahead, and the trainer's, which goes first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from rlctl.batch import Prompts, Rollouts
from rlctl.rollout.protocol import Policy, RolloutEngine, Sampling


class EngineLock:
    """Who may use an engine. A thread that waits as the trainer is let in before any other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_taken = False
        self._num_trainers = 0  # waiting

    @contextlib.contextmanager
    def held(self, *, first: bool) -> Iterator[None]:
        """Hold the engine; `first`: before those who are not."""
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


class Parked(Protocol):
    """What lies on the device only while the engine does not."""

    def park(self) -> None:
        """Leave the device."""
        ...

    def unpark(self) -> None:
        """Return to it."""
        ...


class LockedRollout:
    """A `RolloutEngine` shared by threads.

    Args:
        engine: used by one of them at a time.
        lock: the same for every thread's view of the engine.
        first: whether this is the trainer's, which waits for one batch at most.
        parked: what gives way while the engine is awake; None: nothing does.
    """

    def __init__(
        self, engine: RolloutEngine, lock: EngineLock, *, first: bool, parked: Parked | None = None
    ) -> None:
        self._engine, self._lock, self._first = engine, lock, first
        self._parked = parked

    @property
    def takes_turns(self) -> bool:
        """Whether engine and trainer are never on the device together."""
        return self._parked is not None

    @property
    def description(self) -> str:
        """Of the engine, for the record of a run; one that has none is named after its class."""
        return str(getattr(self._engine, "description", type(self._engine).__name__))

    @property
    def notes(self) -> list[str]:
        """What the engine has to say to the user, if anything."""
        return list(getattr(self._engine, "notes", []))

    def generate(
        self, prompts: Prompts, sampling: Sampling, *, n: int, step_seed: int, num_groups_total: int
    ) -> Rollouts:
        """See `ResponseSampler.generate`."""
        with self._lock.held(first=self._first):
            self._make_room()
            return self._engine.generate(
                prompts, sampling, n=n, step_seed=step_seed, num_groups_total=num_groups_total
            )

    def finish(self) -> None:
        """This rank asks for nothing more until every rank has said so: where ranks share an engine, it
        answers the others' requests until then. Called wherever ranks may ask unequally often.
        """
        if finish := getattr(self._engine, "finish", None):
            with self._lock.held(first=self._first):
                self._make_room()
                finish()

    def release(self, *, weights_follow: bool) -> None:
        """What is sampled for this step is there: an engine that frees memory does so now."""
        if release := getattr(self._engine, "release", None):
            with self._lock.held(first=self._first):
                release(weights_follow=weights_follow)
        if self._parked:
            self._parked.unpark()

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """See `RolloutEngine.sync_weights`; no batch is sampled from a mixture of weights."""
        with self._lock.held(first=self._first):
            self._make_room()
            self._engine.sync_weights(policy, policy_version)

    def _make_room(self) -> None:
        if self._parked:
            self._parked.park()

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        with self._lock.held(first=self._first):
            self._engine.close()
