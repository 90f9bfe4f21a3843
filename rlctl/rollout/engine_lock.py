"""One rollout engine, two threads: the one that samples ahead, and the trainer's, which goes first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

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


class LockedRollout:
    """A `RolloutEngine` shared by threads.

    Args:
        engine: used by one of them at a time.
        lock: the same for every thread's view of the engine.
        first: whether this is the trainer's, which waits for one batch at most.
    """

    def __init__(self, engine: RolloutEngine, lock: EngineLock, *, first: bool) -> None:
        self._engine, self._lock, self._first = engine, lock, first

    @property
    def description(self) -> str:
        """Of the engine, for the record of a run; one that has none is named after its class."""
        return str(getattr(self._engine, "description", type(self._engine).__name__))

    def generate(
        self, prompts: Prompts, sampling: Sampling, *, n: int, step_seed: int, num_groups_total: int
    ) -> Rollouts:
        """See `ResponseSampler.generate`."""
        with self._lock.held(first=self._first):
            return self._engine.generate(
                prompts, sampling, n=n, step_seed=step_seed, num_groups_total=num_groups_total
            )

    def sync_weights(self, policy: Policy, policy_version: int) -> None:
        """See `RolloutEngine.sync_weights`; no batch is sampled from a mixture of weights."""
        with self._lock.held(first=self._first):
            self._engine.sync_weights(policy, policy_version)

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        with self._lock.held(first=self._first):
            self._engine.close()
