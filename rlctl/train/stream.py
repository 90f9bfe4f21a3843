"""A queue of rollouts in training order, sampled ahead in the same thread or concurrently."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import fields
from itertools import takewhile
from pathlib import Path

import torch

from rlctl.batch import Rollouts, TokenLists
from rlctl.errors import RunFailure

_STATE = "rollouts_rank_{rank:05d}.pt"


class RolloutStream:
    """A queue of batches that are sampled but not yet trained on.

    With `ahead` 0 it is empty between steps; with k it holds k batches. Without an executor, the batch of
    a step was sampled exactly k steps earlier, with the weights of that time; only the first k batches, and
    those after `discard`, are fresher. With an executor, batches are sampled during training, each with the
    newest weights when its sampling starts: none is older than k steps, and which are fresher depends on
    timing.

    Args:
        sample: samples the batch of a step with the rollout engine's current weights.
        ahead: maximum number of batches sampled ahead.
        last_step: the run's last step; no batch is sampled for later steps.
        executor: samples in a separate thread, one batch after the other; None: in the calling thread.
    """

    def __init__(
        self,
        sample: Callable[[int], Rollouts],
        *,
        ahead: int,
        last_step: int,
        executor: Executor | None = None,
    ) -> None:
        self._sample = sample
        self._ahead = ahead
        self._last_step = last_step
        self._next_step = 1  # the first step that is not sampled yet
        self._executor = executor
        self._waiting: deque[Future[Rollouts]] = deque()

    @property
    def is_ahead(self) -> bool:
        """Whether batches may be waiting, which must then be saved."""
        return self._ahead > 0

    def take(self, step: int) -> Rollouts:
        """Returns the batch of `step`, which must follow the last step taken.

        Raises:
            ValueError: the step is out of order.
            RunFailure: sampling it failed.
        """
        if step != self._next_step - len(self._waiting):
            raise ValueError(
                f"step {step} is out of order: batches up to step {self._next_step - 1} were started"
            )
        while self._next_step <= min(step + self._ahead, self._last_step):
            self._waiting.append(self._start(self._next_step))
            self._next_step += 1
        return self._waiting.popleft().result()

    def drain(self) -> None:
        """Finishes the batch being sampled and cancels later ones, which are sampled again when due."""
        kept = [batch for batch in self._waiting if not batch.cancel()]
        self._next_step -= len(self._waiting) - len(kept)
        self._waiting = deque(kept)
        for batch in kept:
            batch.exception()  # waits; `take` raises the error

    def discard(self) -> None:
        """Drops the waiting batches; they are sampled again, with the weights of that time."""
        self.drain()
        self._next_step -= len(self._waiting)
        self._waiting.clear()

    def save(self, directory: Path, rank: int) -> None:
        """Writes the waiting batches, after `drain`, so that a resumed run trains on the same ones."""
        if not self._ahead:
            return
        ready = takewhile(lambda batch: batch.done() and not batch.exception(), self._waiting)
        waiting = [{f.name: getattr(batch.result(), f.name) for f in fields(Rollouts)} for batch in ready]
        next_step = self._next_step - len(self._waiting) + len(waiting)
        state = {"next_step": next_step, "waiting": waiting}
        torch.save(state, directory / _STATE.format(rank=rank))

    def resume(self, step: int, directory: Path, rank: int, device: torch.device) -> None:
        """Continues after `step`, with the batches that `save` wrote on this rank.

        Raises:
            RunFailure: they are missing or cannot be read.
        """
        if not self._ahead:
            self._next_step = step + 1
            return
        path = directory / _STATE.format(rank=rank)
        try:
            with torch.serialization.safe_globals([TokenLists]):
                state = torch.load(path, map_location=device, weights_only=True)
            waiting = deque(_done(Rollouts(**tensors)) for tensors in state["waiting"])
            self._next_step, self._waiting = state["next_step"], waiting
        except Exception as error:  # damaged files raise various errors in torch and pickle
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise RunFailure(
                f"the batches waiting to be trained on cannot be read: {reason}", where=str(path)
            ) from error

    def _start(self, step: int) -> Future[Rollouts]:
        return self._executor.submit(self._sample, step) if self._executor else _done(self._sample(step))


def _done(rollouts: Rollouts) -> Future[Rollouts]:
    future: Future[Rollouts] = Future()
    future.set_result(rollouts)
    return future
