"""Rollouts in the order they are trained on, sampled some batches ahead of it: at once, or meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import fields
from itertools import takewhile
from pathlib import Path

import torch

from rlctl.batch import KeptTokens, Rollouts
from rlctl.errors import RunFailure

_STATE = "rollouts_rank_{rank:05d}.pt"


class RolloutStream:
    """A queue of batches sampled but not yet trained on.

    With `ahead` 0 it is empty between steps. With k it holds k batches. Without an executor the batch
    a step takes was sampled exactly k steps before, by the weights of that time, and only the first k
    are fresher. With one, batches are sampled while the trainer trains, each with the newest weights
    there are when its turn comes: none is older than k steps, which ones are fresher depends on the
    clock.

    Args:
        sample: samples the batch of a step with the rollout engine's present weights.
        ahead: batches to be ahead, at most.
        last_step: the run's last step, beyond which nothing is sampled.
        next_step: the first step to sample.
        executor: samples in a thread of its own, batch after batch; None: in the caller's.
    """

    def __init__(
        self,
        sample: Callable[[int], Rollouts],
        *,
        ahead: int,
        last_step: int,
        next_step: int = 1,
        executor: Executor | None = None,
    ) -> None:
        self._sample = sample
        self._ahead = ahead
        self._last_step = last_step
        self._next_step = next_step
        self._executor = executor
        self._waiting: deque[Future[Rollouts]] = deque()

    @property
    def is_ahead(self) -> bool:
        """Whether batches may wait, and so must be saved."""
        return self._ahead > 0

    def take(self, step: int) -> Rollouts:
        """The batch of `step`, which must be the one after the last taken.

        Raises:
            ValueError: it is another one's turn.
            RunFailure: sampling it failed.
        """
        if step != self._next_step - len(self._waiting):
            raise ValueError(f"step {step} asks for a batch out of turn, before {self._next_step}")
        while self._next_step <= min(step + self._ahead, self._last_step):
            self._waiting.append(self._start(self._next_step))
            self._next_step += 1
        return self._waiting.popleft().result()

    def drain(self) -> None:
        """Finish the batch being sampled; those after it are begun anew when they are due."""
        kept = [batch for batch in self._waiting if not batch.cancel()]
        self._next_step -= len(self._waiting) - len(kept)
        self._waiting = deque(kept)
        for batch in kept:
            batch.exception()  # waits; `take` raises it

    def save(self, directory: Path, rank: int) -> None:
        """Write what waits, after a `drain`, so that a resumed run trains on the same batches."""
        if not self._ahead:
            return
        ready = takewhile(lambda batch: batch.done() and not batch.exception(), self._waiting)
        waiting = [{f.name: getattr(batch.result(), f.name) for f in fields(Rollouts)} for batch in ready]
        next_step = self._next_step - len(self._waiting) + len(waiting)
        state = {"next_step": next_step, "waiting": waiting}
        torch.save(state, directory / _STATE.format(rank=rank))

    def resume(self, step: int, directory: Path, rank: int, device: torch.device) -> None:
        """Go on after `step`, with the batches that `save` wrote on this rank.

        Raises:
            RunFailure: they are missing or cannot be read.
        """
        if not self._ahead:
            self._next_step = step + 1
            return
        path = directory / _STATE.format(rank=rank)
        try:
            with torch.serialization.safe_globals([KeptTokens]):
                state = torch.load(path, map_location=device, weights_only=True)
            waiting = deque(_done(Rollouts(**tensors)) for tensors in state["waiting"])
            self._next_step, self._waiting = state["next_step"], waiting
        except Exception as error:  # whatever torch and pickle make of damaged bytes
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
