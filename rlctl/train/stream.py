"""Rollouts in the order they are trained on, sampled `rollout.staleness` batches ahead of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch

from rlctl.batch import Rollouts
from rlctl.errors import RunFailure

_STATE = "rollouts_rank_{rank:05d}.pt"


class RolloutStream:
    """A queue of batches sampled but not yet trained on.

    With `staleness` 0 it is empty between steps. With k it holds k batches: the one a step takes was
    sampled k steps before, by the weights of that time, and only the first k are fresher.

    Args:
        sample: samples the batch of a step with the rollout engine's present weights.
        staleness: batches to be ahead.
        last_step: the run's last step, beyond which nothing is sampled.
        next_step: the first step to sample.
    """

    def __init__(
        self, sample: Callable[[int], Rollouts], *, staleness: int, last_step: int, next_step: int = 1
    ) -> None:
        self._sample = sample
        self._staleness = staleness
        self._last_step = last_step
        self._next_step = next_step
        self._waiting: deque[Rollouts] = deque()

    def take(self, step: int) -> Rollouts:
        """The batch of `step`, which must be the one after the last taken.

        Raises:
            ValueError: it is another one's turn.
        """
        if step != self._next_step - len(self._waiting):
            raise ValueError(f"step {step} asks for a batch out of turn, before {self._next_step}")
        while self._next_step <= min(step + self._staleness, self._last_step):
            self._waiting.append(self._sample(self._next_step))
            self._next_step += 1
        return self._waiting.popleft()

    def save(self, directory: Path, rank: int) -> None:
        """Write what is waiting, so that a resumed run trains on the same batches."""
        if not self._staleness:
            return
        waiting = [
            {f.name: getattr(rollouts, f.name) for f in fields(rollouts)} for rollouts in self._waiting
        ]
        state = {"next_step": self._next_step, "waiting": waiting}
        torch.save(state, directory / _STATE.format(rank=rank))

    def resume(self, step: int, directory: Path, rank: int, device: torch.device) -> None:
        """Go on after `step`, with the batches that `save` wrote on this rank.

        Raises:
            RunFailure: they are missing or cannot be read.
        """
        if not self._staleness:
            self._next_step = step + 1
            return
        path = directory / _STATE.format(rank=rank)
        try:
            state = torch.load(path, map_location=device, weights_only=True)
            waiting = deque(Rollouts(**tensors) for tensors in state["waiting"])
            self._next_step, self._waiting = state["next_step"], waiting
        except Exception as error:  # whatever torch and pickle make of damaged bytes
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise RunFailure(
                f"the batches waiting to be trained on cannot be read: {reason}", where=str(path)
            ) from error
