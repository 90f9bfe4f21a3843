"""Groups of each step: the queue of those sampled ahead, and the draws of dynamic sampling.

Groups are sampled ahead in the same thread or concurrently. A checkpoint contains those that wait, and the
draws.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path

import torch

from rlctl.algos.estimators import spread_probability
from rlctl.batch import Episode, Group, Task, TokenLists
from rlctl.batch import Sequence as TokenSequence
from rlctl.data.prompts import PromptDataset
from rlctl.engine.ranks import Ranks
from rlctl.environment.build import EpisodeSource
from rlctl.errors import RunFailure, first_line
from rlctl.rollout.protocol import LockedRollout, sampling_of, step_seed
from rlctl.spec.run_spec import RunSpec

_STATE = "rollouts_rank_{rank:05d}.pt"
#: What a group consists of, besides tensors and plain data.
_RECORDS = (Episode, Task, TokenSequence, TokenLists)


def sample_groups(
    spec: RunSpec,
    ranks: Ranks,
    prompts: PromptDataset,
    rollout: LockedRollout,
    source: EpisodeSource,
    step: int,
) -> list[Group]:
    """Samples this rank's groups of one step, of `rollout.n` episodes each."""
    tasks = step_tasks(spec, ranks, prompts, step)
    seed = step_seed(spec.trainer.seed, step)
    groups = source.groups(rollout, tasks, spec.rollout.n, sampling_of(spec), seed)
    if spec.environment.has_episodes:  # ranks make different numbers of requests
        rollout.finish()
    return groups


def step_tasks(spec: RunSpec, ranks: Ranks, prompts: PromptDataset, step: int) -> list[Task]:
    """This rank's tasks of one step; `group_id` is their index in the whole batch."""
    batch_size = spec.data.train_batch_size
    indices = prompts.batch_indices(step - 1, batch_size, seed=spec.trainer.seed, shuffle=spec.data.shuffle)
    mine = rank_positions(batch_size, spec.ppo_mini_batch_size, rank=ranks.rank, world_size=ranks.world_size)
    return prompts.tasks([indices[place] for place in mine], mine)


def rank_positions(
    train_batch_size: int, ppo_mini_batch_size: int, *, rank: int, world_size: int
) -> list[int]:
    """Indices in the whole batch of this rank's prompts, in its order.

    Every mini-batch is divided evenly among the ranks, so that mini-batch k contains the same
    prompts for any number of ranks.
    """
    share = ppo_mini_batch_size // world_size
    return [
        start + rank * share + i
        for start in range(0, train_batch_size, ppo_mini_batch_size)
        for i in range(share)
    ]


class RolloutStream:
    """A queue of groups that are sampled but not yet trained on.

    With `ahead` 0 it is empty between steps; with k it holds the groups of k steps. Without an executor,
    those of a step were sampled exactly k steps earlier, with the weights of that time; only those of the
    first k steps are fresher. With an executor, they are sampled during training, each step's with the
    newest weights when its sampling starts: none is older than k steps, and which are fresher depends on
    timing.

    Args:
        sample: samples the groups of a step with the rollout engine's current weights.
        ahead: maximum number of steps whose groups are sampled ahead.
        last_step: the run's last step; nothing is sampled for later steps.
        executor: samples in a separate thread, one step after the other; None: in the calling thread.
    """

    def __init__(
        self,
        sample: Callable[[int], list[Group]],
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
        self._waiting: deque[Future[list[Group]]] = deque()  # one entry per step

    @property
    def is_ahead(self) -> bool:
        """Whether groups may be waiting, which must then be saved."""
        return self._ahead > 0

    def take(self, step: int) -> list[Group]:
        """Returns the groups of `step`, which must follow the last step taken.

        Raises:
            ValueError: the step is out of order.
            RunFailure: sampling it failed.
        """
        if step != self._next_step - len(self._waiting):
            raise ValueError(
                f"step {step} is out of order: sampling up to step {self._next_step - 1} was started"
            )
        while self._next_step <= min(step + self._ahead, self._last_step):
            self._waiting.append(self._start(self._next_step))
            self._next_step += 1
        return self._waiting.popleft().result()

    def drain(self) -> None:
        """Finishes the step being sampled and cancels later ones, which are sampled again when due."""
        kept = [groups for groups in self._waiting if not groups.cancel()]
        self._next_step -= len(self._waiting) - len(kept)
        self._waiting = deque(kept)
        for groups in kept:
            groups.exception()  # waits; `take` raises the error

    def save(self, directory: Path, rank: int) -> None:
        """Writes the waiting groups, after `drain`, so that a resumed run trains on the same ones."""
        if not self._ahead:
            return
        ready = takewhile(lambda groups: groups.done() and not groups.exception(), self._waiting)
        waiting = [groups.result() for groups in ready]
        next_step = self._next_step - len(self._waiting) + len(waiting)
        state = {"next_step": next_step, "waiting": waiting}
        torch.save(state, directory / _STATE.format(rank=rank))

    def resume(self, step: int, directory: Path, rank: int) -> None:
        """Continues after `step`, with the groups that `save` wrote on this rank.

        Raises:
            RunFailure: they are missing or cannot be read.
        """
        if not self._ahead:
            self._next_step = step + 1
            return
        path = directory / _STATE.format(rank=rank)
        try:
            with torch.serialization.safe_globals(list(_RECORDS)):
                state = torch.load(path, weights_only=True)
            steps = [[tuple(group) for group in groups] for groups in state["waiting"]]
            if not all(isinstance(e, Episode) for groups in steps for group in groups for e in group):
                raise ValueError("another version of rlctl wrote it")
            self._next_step, self._waiting = state["next_step"], deque(map(_done, steps))
        except Exception as error:  # damaged files raise various errors in torch and pickle
            what = f"the groups waiting to be trained on cannot be read: {first_line(error)}"
            raise RunFailure(what, where=str(path)) from error

    def _start(self, step: int) -> Future[list[Group]]:
        return self._executor.submit(self._sample, step) if self._executor else _done(self._sample(step))


def _done(groups: list[Group]) -> Future[list[Group]]:
    future: Future[list[Group]] = Future()
    future.set_result(groups)
    return future


@dataclass
class PromptDraws:
    """Position in the prompts, and their measured scores; the same on every rank.

    Attributes:
        position: prompts drawn so far, over all epochs, skipped ones included.
        low, high: smallest and largest mean score of a group so far.
        measured: row → mean score of its last group, and number of graded responses in it.
    """

    position: int = 0
    low: float = math.inf
    high: float = -math.inf
    measured: dict[int, tuple[float, int]] = field(default_factory=dict)

    def note(self, row: int, mean: float, count: int) -> None:
        """Records the mean score of a prompt's group."""
        self.low, self.high = min(self.low, mean), max(self.high, mean)
        self.measured[row] = (mean, count)

    def chance(self, row: int, n: int, floor: float) -> float:
        """Probability of drawing a prompt at its turn: that its group has spread, at least `floor`."""
        if row not in self.measured or self.high <= self.low:
            return 1.0
        mean, count = self.measured[row]
        rate = ((mean - self.low) / (self.high - self.low) * count + 1.0) / (count + 2.0)
        return max(floor, spread_probability(rate, n))

    def save(self, path: Path) -> None:
        """Writes the state as JSON."""
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> PromptDraws:
        """Reads a file that `save` wrote.

        Raises:
            RunFailure: the file cannot be read.
        """
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            measured = {int(row): (float(mean), int(n)) for row, (mean, n) in given.pop("measured").items()}
            return cls(**given, measured=measured)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"the state of dynamic sampling cannot be read: {error}"
            raise RunFailure(what, where=str(path)) from error
