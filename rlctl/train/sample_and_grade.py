"""The groups of each step that this rank samples, and their grades; the queue of those sampled ahead.

Groups are sampled ahead in the same thread or concurrently. A checkpoint contains those that wait, and the
numbers of those that are being sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlctl.batch import Episode, Group, Task, TokenLists
from rlctl.batch import Sequence as TokenSequence
from rlctl.engine.ranks import Ranks
from rlctl.errors import RunFailure, first_line
from rlctl.reward.protocol import Graded, RewardResult
from rlctl.rollout.protocol import Sampling, sampling_of, step_seed
from rlctl.spec.run_spec import RunSpec
from rlctl.train.filter_groups import filtered_groups, placed
from rlctl.train.run import is_sync_due
from rlctl.train.step_metrics import StepTimer

if TYPE_CHECKING:
    from rlctl.train.run import Run

_STATE = "rollouts_rank_{rank:05d}.pt"
#: What a group consists of, besides tensors and plain data.
_RECORDS = (Episode, Task, TokenSequence, TokenLists)


def sample_and_grade(run: Run, step: int, timer: StepTimer) -> Graded:
    """The groups of a step that this rank samples, and their grades.

    With dynamic sampling, ranks may have different numbers of groups.
    """
    if run.draws is not None:
        groups, rewards, cost = filtered_groups(run, step, run.draws, timer)
        return Graded(groups, rewards, greedy_baseline(run, step, groups, timer), cost)
    with timer("gen"):
        groups = run.stream.take(step)
    counts = {}
    if run.spec.rollout.max_staleness:
        counts["rollout/restarted_episodes"] = float(run.stream.num_restarted)
    if run.spec.rollout.in_flight:
        counts["rollout/open_groups"] = float(run.stream.num_open)
        counts["rollout/repeated_requests"] = float(run.rollout.num_repeated)
    baseline = greedy_baseline(run, step, groups, timer)
    with timer("reward"):
        rewards = run.reward.score([episode for group in groups for episode in group])
    if counts:
        counts = dict(zip(counts, run.ranks.sum([*counts.values()]), strict=True))
    return Graded(groups, rewards, baseline, counts)


def sample_groups(run: Run, step: int, index: int) -> list[Group]:
    """Samples this rank's groups of a step, of `rollout.n` episodes each; in flight only that at `index`.

    The `group_id` of a task is its index in the whole batch.
    """
    spec, prompts, places = run.spec, run.train_prompts, places_of(run.spec, run.ranks)
    seed, size = spec.trainer.seed, spec.data.train_batch_size
    rows = prompts.batch_indices(step - 1, size, seed=seed, shuffle=spec.data.shuffle)
    places = places[index : index + 1] if spec.rollout.in_flight else places
    tasks = prompts.tasks([rows[place] for place in places], places)
    rollout = run.sampling_ahead if spec.rollout.max_staleness else run.rollout
    sampling = sampling_of(spec)
    groups = run.episodes.groups(rollout, tasks, spec.rollout.n, sampling, step_seed(seed, step))
    if spec.environment.has_episodes:  # ranks make different numbers of requests
        rollout.finish()
    return groups


def greedy_baseline(run: Run, step: int, groups: list[Group], timer: StepTimer) -> RewardResult | None:
    """For every episode of these groups, the grade of the greedy episode of its task.

    None unless the estimator is ReMax. This is the last sampling before the weight sync, so the engine
    releases its memory in either case.
    """
    spec = run.spec
    weights_follow = is_sync_due(run, step)
    if not spec.algorithm.estimator_needs("baseline_scores"):
        run.rollout.release(weights_follow=weights_follow)
        return None
    with timer("gen_max"):
        greedy = run.episodes.sample(
            run.rollout,
            [(group[0].task, 0) for group in groups],
            Sampling(max_response_length=spec.data.max_response_length, greedy=True),
            step_seed(spec.trainer.seed, step, "greedy"),
        )
        run.rollout.finish()
    run.rollout.release(weights_follow=weights_follow)
    with timer("reward"):
        graded = run.reward.score(greedy)
    own = [place for place, group in enumerate(groups) for _ in group]
    return replace(graded.pick(own), errors=graded.errors)


def places_of(spec: RunSpec, ranks: Ranks) -> list[int]:
    """Indices in the whole batch of the prompts that this rank samples, in its order.

    Every mini-batch is divided evenly among the ranks, so that mini-batch k contains the same
    prompts for any number of ranks.
    """
    mini_batch = spec.ppo_mini_batch_size
    share = mini_batch // ranks.world_size
    starts = range(ranks.rank * share, spec.data.train_batch_size, mini_batch)
    return [start + i for start in starts for i in range(share)]


class RolloutStream:
    """A queue of groups that are sampled but not yet trained on.

    It consists of jobs, which sample all groups of a step, or with `places` one group each. With `ahead` 0 it
    is empty between steps; with k it holds the groups of k steps. Without an executor, those of a step were
    sampled exactly k steps earlier, with the weights of that time; only those of the first k steps are
    fresher. With an executor, they are sampled during training, each job's with the newest weights when its
    sampling starts; taken in order, none is older than k steps, and which are fresher depends on timing.

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
        sample: Callable[[int, int], list[Group]],
        *,
        ahead: int,
        last_step: int,
        executor: Executor | None = None,
        places: Sequence[int] | None = None,
        in_order: bool = True,
    ) -> None:
        self._sample, self._executor = sample, executor
        self._ahead, self._last_step = ahead, last_step
        self._places, self._in_order = places, in_order
        self._per_step = 1 if places is None else len(places)
        self._taken = 0  # steps
        self._next = 0  # the first job that has not been started
        self._jobs: dict[int, Future[list[Group]]] = {}  # those that have been started and not taken
        self._again: set[int] = set()  # those that were open in the checkpoint
        self.num_restarted = 0  # episodes of the last batch that were open in the checkpoint

    @property
    def num_open(self) -> int:
        """Number of jobs that are being sampled."""
        return sum(not job.done() for job in self._jobs.values())

    def take(self, step: int) -> list[Group]:
        """Returns the groups of `step`, which must follow the last step taken.

        Raises:
            ValueError: the step is out of order.
            RunFailure: sampling it failed.
        """
        if step != self._taken + 1:
            raise ValueError(f"step {step} is out of order: it follows step {self._taken}")
        end = min(step + self._ahead, self._last_step) * self._per_step
        for job in [*sorted(self._again - self._jobs.keys()), *range(self._next, end)]:
            self._jobs[job] = self._start(job)
        self._next = max(self._next, end)
        taken = self._first_jobs()
        self._taken, self._jobs = step, {job: f for job, f in self._jobs.items() if job not in taken}
        self.num_restarted = sum(len(g) for job in self._again & taken.keys() for g in taken[job])
        self._again -= taken.keys()
        groups = [group for job in sorted(taken) for group in taken[job]]
        return groups if self._places is None else list(map(placed, groups, self._places))

    def _first_jobs(self) -> dict[int, list[Group]]:
        """The jobs of a step and their groups; waits for them."""
        jobs = sorted(self._jobs)
        if self._in_order:
            return {job: self._jobs[job].result() for job in jobs[: self._per_step]}
        while True:
            ready = {job: self._jobs[job].result() for job in jobs if self._jobs[job].done()}
            if len(ready) >= self._per_step:
                return dict(list(ready.items())[: self._per_step])
            wait([job for job in self._jobs.values() if not job.done()], return_when=FIRST_COMPLETED)

    def save(self, directory: Path, rank: int) -> None:
        """Writes the waiting groups and the open jobs, so that a resumed run trains on the same ones."""
        if not self._ahead:
            return
        ready = {job: f.result() for job, f in self._jobs.items() if f.done() and not f.exception()}
        state = {"next": self._next, "waiting": ready, "open": sorted(self._jobs.keys() - ready)}
        torch.save(state, directory / _STATE.format(rank=rank))

    def resume(self, step: int, directory: Path, rank: int) -> None:
        """Continues after `step`, with the groups that `save` wrote on this rank.

        Raises:
            RunFailure: they are missing or cannot be read.
        """
        self._taken, self._next = step, step * self._per_step
        if not self._ahead:
            return
        path = directory / _STATE.format(rank=rank)
        try:
            with torch.serialization.safe_globals(list(_RECORDS)):
                state = torch.load(path, weights_only=True)
            found = {job: list(map(tuple, groups)) for job, groups in state["waiting"].items()}
            if not all(isinstance(e, Episode) for groups in found.values() for g in groups for e in g):
                raise ValueError("another version of rlctl wrote it")
            self._next, self._again = state["next"], set(state["open"])
            self._jobs = {job: _done(groups) for job, groups in found.items()}
        except Exception as error:  # damaged files raise various errors in torch and pickle
            what = f"the groups waiting to be trained on cannot be read: {first_line(error)}"
            raise RunFailure(what, where=str(path)) from error

    def _start(self, job: int) -> Future[list[Group]]:
        step, index = divmod(job, self._per_step)
        if self._executor:
            return self._executor.submit(self._sample, step + 1, index)
        return _done(self._sample(step + 1, index))


def _done(groups: list[Group]) -> Future[list[Group]]:
    future: Future[list[Group]] = Future()
    future.set_result(groups)
    return future
