"""Lock for an engine used by two threads: the trainer's has priority over the one that samples ahead."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from rlctl.batch import Prompts, Rollouts
from rlctl.errors import RunFailure
from rlctl.rollout.protocol import Policy, RolloutEngine, Sampling

#: (B, T) field of `Rollouts` → its possible types.
_DTYPES = {"rollout_log_probs": (torch.float32, torch.float64), "response_mask": (torch.bool,)}


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
    def description(self) -> str:
        """The engine's description for the record of a run; its class name if it has none."""
        return str(getattr(self._engine, "description", type(self._engine).__name__))

    @property
    def notes(self) -> list[str]:
        """The engine's messages to the user, if any."""
        return list(getattr(self._engine, "notes", []))

    def generate(
        self, prompts: Prompts, sampling: Sampling, *, n: int, step_seed: int, num_groups_total: int
    ) -> Rollouts:
        """See `ResponseSampler.generate`."""
        with self._in_use():
            found = self._engine.generate(
                prompts, sampling, n=n, step_seed=step_seed, num_groups_total=num_groups_total
            )
        if not isinstance(found, Rollouts):
            what = f"{type(self._engine).__name__}.generate returned {type(found).__name__}"
            raise RunFailure(what, where="rollout.name", fix="return Rollouts; `assemble` makes them")
        shape = (n * len(prompts.group_ids), found.responses.shape[-1])
        for name, dtypes in _DTYPES.items():
            values = getattr(found, name)
            if tuple(values.shape) != shape or values.dtype not in dtypes:
                of = f"{type(self._engine).__name__}.generate returned {name}"
                what = f"{of} of shape {tuple(values.shape)} and type {values.dtype}"
                raise RunFailure(what, where="rollout.name", fix=f"return {dtypes[0]} of shape {shape}")
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
