"""Groups of each step: the queue of those sampled ahead, and the draws of dynamic sampling.

Groups are sampled ahead in the same thread or concurrently. A checkpoint contains those that wait, the
numbers of those that are being sampled, and the draws.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from rlctl.algos.estimators import spread_probability
from rlctl.batch import Task, TokenBatch, TokenLists
from rlctl.engine.ranks import Ranks
from rlctl.engine.state_files import StateFiles
from rlctl.episodes import Episodes
from rlctl.errors import RunFailure, first_line
from rlctl.files import read_text
from rlctl.run_spec.run_spec import RunSpec

_STATE = "rollouts_rank_{rank:05d}.pt"
#: What episodes consist of, besides tensors and plain data.
_RECORDS = (Episodes, Task, TokenBatch, TokenLists)


def places_of(spec: RunSpec, ranks: Ranks) -> list[int]:
    """Indices in the whole batch of the prompts that this rank samples, in its order.

    Every mini-batch is divided evenly among the ranks, so that mini-batch k contains the same
    prompts for any number of ranks.
    """
    mini_batch = spec.ppo_mini_batch_size
    share = mini_batch // ranks.world_size
    starts = range(ranks.rank * share, spec.data.train_batch_size, mini_batch)
    return [start + i for start in starts for i in range(share)]


@dataclass(frozen=True, order=True, slots=True)
class Job:
    """What is sampled at once, by its step and its index in the step."""

    step: int
    index: int


class RolloutStream:
    """A queue of groups that are sampled but not yet trained on.

    It consists of jobs, which sample all groups of a step, or with `places` one group each. With `ahead` 0 it
    is empty between steps; with k it holds the groups of k steps. Without an executor, those of a step were
    sampled exactly k steps earlier, with the weights of that time; only those of the first k steps are
    fresher. With an executor, they are sampled during training, each job's with the newest weights when its
    sampling starts; taken in order, none is older than k steps, and which are fresher depends on timing.

    Example: two groups per step, one step ahead, those first that are ready. For step 1 the jobs (1, 0),
    (1, 1), (2, 0), (2, 1) start. If (1, 1) and (2, 0) are ready first, step 1 trains on them, (2, 0) at the
    place of the first group. For step 2 the jobs (3, 0), (3, 1) start; (1, 0) and (2, 1) are still open.

    Threads: the training thread calls the methods. Only `sample` runs in those of the executor, and the
    futures are all that they share with it. Sampling and weight syncs are kept apart by the lock of the
    engine (`rlctl.rollout.shared_engine`).

    A job that was being sampled when the checkpoint was written is sampled again in the resumed run, with the
    same seeds. So every prompt is used once, however often a run was killed.

    Args:
        sample: samples the groups of a job, given by its step and its index in the step, with the rollout
            engine's current weights.
        ahead: maximum number of steps whose groups are sampled ahead.
        last_step: the run's last step; nothing is sampled for later steps.
        executor: samples in separate threads; None: in the calling thread.
        places: a job is one group, and these are the `group_id` of this rank's groups in a batch. None: a job
            is a step.
        in_order: jobs are taken in their order; otherwise those that are ready first.
    """

    def __init__(
        self,
        sample: Callable[[int, int], Episodes],
        *,
        ahead: int,
        last_step: int,
        executor: Executor | None = None,
        places: Sequence[int] | None = None,
        in_order: bool = True,
    ) -> None:
        self._sample = sample
        self._executor = executor
        self._ahead = ahead
        self._last_step = last_step
        self._places = places
        self._in_order = in_order
        self._per_step = 1 if places is None else len(places)
        self._taken = 0  # steps whose groups were taken
        self._started = 0  # steps whose jobs have been started
        self._jobs: dict[Job, Future[Episodes]] = {}  # those that have been started and not taken
        self._again: set[Job] = set()  # those that were open in the checkpoint
        self.num_restarted = 0  # episodes of the last batch that were open in the checkpoint

    @property
    def num_open(self) -> int:
        """Number of jobs that are being sampled."""
        return sum(not job.done() for job in self._jobs.values())

    def take(self, step: int) -> Episodes:
        """Returns the episodes of `step`, which must follow the last step taken.

        Raises:
            ValueError: the step is out of order.
            RunFailure: sampling it failed.
        """
        if step != self._taken + 1:
            raise ValueError(f"step {step} is out of order: it follows step {self._taken}")
        self._start_steps(min(step + self._ahead, self._last_step))
        taken = self._first_ready()
        self._taken = step
        for job in taken:
            del self._jobs[job]
        restarted = self._again & taken.keys()
        self.num_restarted = sum(len(taken[job]) for job in restarted)
        self._again -= restarted
        groups = [taken[job] for job in sorted(taken)]
        if self._places is not None:  # each is one group, maybe of another step
            pairs = zip(groups, self._places, strict=True)
            groups = [group.placed({group.tasks[0].group_id: place}) for group, place in pairs]
        return Episodes.joined(groups)

    def _start_steps(self, last: int) -> None:
        """Starts the jobs of all steps up to `last`; before them those that were open in the checkpoint."""
        again = sorted(self._again - self._jobs.keys())
        steps = range(self._started + 1, last + 1)
        new = [Job(step, index) for step in steps for index in range(self._per_step)]
        for job in [*again, *new]:
            self._jobs[job] = self._start(job)
        self._started = max(self._started, last)

    def _start(self, job: Job) -> Future[Episodes]:
        if self._executor:
            return self._executor.submit(self._sample, job.step, job.index)
        return _done(self._sample(job.step, job.index))

    def _first_ready(self) -> dict[Job, Episodes]:
        """As many jobs as a step has, and their groups; waits for them."""
        if self._in_order:
            first = sorted(self._jobs)[: self._per_step]
            return {job: self._jobs[job].result() for job in first}
        while True:
            done = [job for job in sorted(self._jobs) if self._jobs[job].done()]
            ready = {job: self._jobs[job].result() for job in done}  # the failure of any is the step's
            if len(ready) >= self._per_step:
                return dict(list(ready.items())[: self._per_step])
            still_open = [future for future in self._jobs.values() if not future.done()]
            wait(still_open, return_when=FIRST_COMPLETED)

    def save(self, directory: Path, rank: int, files: StateFiles | None = None) -> None:
        """Writes the waiting groups and the open jobs, so that a resumed run trains on the same ones.

        Args:
            files: how the file is written; None: at once.
        """
        if not self._ahead:
            return
        waiting: dict[tuple[int, int], Episodes] = {}
        still_open: list[tuple[int, int]] = []
        for job in sorted(self._jobs):
            future = self._jobs[job]
            if future.done() and not future.exception():
                waiting[job.step, job.index] = future.result()
            else:
                still_open.append((job.step, job.index))
        state = {"started": self._started, "waiting": waiting, "open": still_open}
        with (files or StateFiles()).open(directory / _STATE.format(rank=rank)) as file:
            torch.save(state, file)

    def resume(self, step: int, directory: Path, rank: int) -> None:
        """Continues after `step`, with the groups that `save` wrote on this rank.

        Raises:
            RunFailure: they are missing or cannot be read.
        """
        self._taken = self._started = step
        if not self._ahead:
            return
        path = directory / _STATE.format(rank=rank)
        try:
            with torch.serialization.safe_globals(list(_RECORDS)):
                state = torch.load(path, weights_only=True)
            waiting = dict(state["waiting"])
            if not all(isinstance(episodes, Episodes) for episodes in waiting.values()):
                raise ValueError("another version of rlctl wrote it")
            self._started = state["started"]
            self._again = {Job(*job) for job in state["open"]}
            self._jobs = {Job(*job): _done(episodes) for job, episodes in waiting.items()}
        except Exception as error:  # damaged files raise various errors in torch and pickle
            message = f"the groups waiting to be trained on cannot be read: {first_line(error)}"
            raise RunFailure(message, where=str(path)) from error


def _done(episodes: Episodes) -> Future[Episodes]:
    future: Future[Episodes] = Future()
    future.set_result(episodes)
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
        self.low = min(self.low, mean)
        self.high = max(self.high, mean)
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
            state = json.loads(read_text(path))
            measured = {int(row): (float(mean), int(n)) for row, (mean, n) in state.pop("measured").items()}
            return cls(**state, measured=measured)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"the state of dynamic sampling cannot be read: {error}"
            raise RunFailure(message, where=str(path)) from error
