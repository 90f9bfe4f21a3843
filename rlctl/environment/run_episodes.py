"""Runs the episodes of a batch at the same time: those that wait for the policy share its batches.

Episodes are coroutines of one thread. The engine samples in another thread, so that environments go on
meanwhile: a slow episode does not hold the others. With `environment.lockstep` the engine waits until every
episode waits for it; batches are then the same in every run of a deterministic environment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlctl.batch import Episode, Task, Turn
from rlctl.environment.protocol import EnvironmentFault, LimitReached, Outcome
from rlctl.environment.recording import Recorder
from rlctl.errors import first_line
from rlctl.rollout.protocol import Request, turn_seed
from rlctl.spec.base import seconds

if TYPE_CHECKING:
    from rlctl.environment.protocol import Environment
    from rlctl.rollout.protocol import ResponseSampler, Sampling
    from rlctl.spec.environment import EnvironmentSpec


@dataclass(slots=True)
class _Waiting:
    """A turn that waits for the policy."""

    key: tuple[int, int, int]  # group, member, turn: the order within a batch
    request: Request
    turn: asyncio.Future[Turn]
    started: float = 0.0


class Conductor:
    """Collects the turns that wait, and samples them in batches.

    Attributes:
        num_live: episodes that have not ended.
    """

    def __init__(self, engine: ResponseSampler, sampling: Sampling, *, lockstep: bool) -> None:
        self._engine, self._sampling, self._lockstep = engine, sampling, lockstep
        self._waiting: list[_Waiting] = []
        self._changed = asyncio.Event()
        self.num_live = 0

    async def sample(self, key: tuple[int, int, int], request: Request) -> tuple[Turn, float]:
        """The turn, and the seconds for which it waited for its batch to start."""
        waiting = _Waiting(key, request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._changed.set()
        asked = time.perf_counter()
        return await waiting.turn, waiting.started - asked

    def ended(self) -> None:
        """An episode has ended."""
        self.num_live -= 1
        self._changed.set()

    async def serve(self) -> None:
        """Samples until it is cancelled; an error of the engine ends all episodes that wait."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._waiting = [one for one in self._waiting if not one.turn.done()]  # of ended episodes
            if not self._waiting or (self._lockstep and len(self._waiting) < self.num_live):
                continue
            batch = sorted(self._waiting, key=lambda one: one.key)
            self._waiting = []
            for one in batch:
                one.started = time.perf_counter()
            try:
                requests = [one.request for one in batch]
                turns = await asyncio.to_thread(self._engine.sample, requests, self._sampling)
            except Exception as error:
                for one in batch:
                    if not one.turn.done():
                        one.turn.set_exception(_EngineFailed(error))
                continue
            for one, turn in zip(batch, turns, strict=True):
                if not one.turn.done():  # cancelled: its episode ran out of time
                    one.turn.set_result(turn)


class _EngineFailed(BaseException):
    """Passes through environments, which may catch any `Exception`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class EpisodeSampler:
    """The `Sampler` of one episode: applies its limits, seeds its turns, and measures its seconds.

    Attributes:
        recorder: the tokens so far.
        policy_s, waiting_s: seconds in which the policy sampled, and in which a turn waited for it.
    """

    def __init__(
        self,
        conductor: Conductor,
        task: Task,
        member: int,
        step_seed: int,
        spec: EnvironmentSpec,
        sampling: Sampling,
        context_length: int,
    ) -> None:
        self._conductor, self._task, self._member, self._seed = conductor, task, member, step_seed
        self._spec, self._context_length = spec, context_length
        self._of_turn = sampling.max_response_length
        self._budget = spec.max_episode_tokens or spec.max_turns * self._of_turn
        self._started = time.perf_counter()
        self.recorder = Recorder()
        self.policy_s = self.waiting_s = 0.0

    @property
    def environment_s(self) -> float:
        """Seconds so far without those of the policy."""
        return time.perf_counter() - self._started - self.policy_s - self.waiting_s

    async def sample(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Turn:
        """See `Sampler.sample`."""
        number = self.recorder.num_turns
        left = self._budget - self.recorder.num_sampled
        for reason, is_reached in (
            ("max_turns", number >= self._spec.max_turns),
            ("max_tokens", left <= 0),
            ("context_overflow", len(token_ids) >= self._context_length),
            ("timeout", self.environment_s > seconds(self._spec.episode_timeout)),
        ):
            if is_reached:
                raise LimitReached(reason)
        limits = [self._of_turn, left, self._context_length - len(token_ids), max_tokens or self._of_turn]
        seed = turn_seed(self._seed, self._task.group_id, self._member, number)
        asked = time.perf_counter()
        turn, waited = await self._conductor.sample(
            (self._task.group_id, self._member, number), Request(list(token_ids), seed, min(limits))
        )
        self.waiting_s += waited
        self.policy_s += time.perf_counter() - asked - waited
        self.recorder.add(token_ids, turn)
        return turn


def run_episodes(
    environment: Environment,
    engine: ResponseSampler,
    members: Sequence[tuple[Task, int]],
    sampling: Sampling,
    step_seed: int,
    spec: EnvironmentSpec,
    context_length: int,
) -> list[Episode]:
    """The episodes with these tasks and indices within their groups, in that order.

    An episode that failed by a fault of the environment has `error` set: it is excluded, and never has a
    reward of 0 instead.

    Raises:
        RlctlError: the engine failed.
    """

    async def run_all() -> list[Episode]:
        conductor = Conductor(engine, sampling, lockstep=spec.lockstep)
        serving = asyncio.create_task(conductor.serve())
        slots = asyncio.Semaphore(spec.concurrency)

        async def one(task: Task, member: int) -> Episode:
            async with slots:
                sampler = EpisodeSampler(conductor, task, member, step_seed, spec, sampling, context_length)
                conductor.num_live += 1
                try:
                    return await _episode(environment, task, member, sampler, spec)
                finally:
                    conductor.ended()

        try:
            return list(await asyncio.gather(*(one(*each) for each in members)))
        finally:
            serving.cancel()

    try:
        return asyncio.run(run_all())
    except _EngineFailed as failed:
        raise failed.error from None


async def _episode(
    environment: Environment, task: Task, member: int, sampler: EpisodeSampler, spec: EnvironmentSpec
) -> Episode:
    """Runs one episode to its end, its limit, or its failure."""
    running = asyncio.ensure_future(environment.run(task, sampler))
    limit, error = seconds(spec.episode_timeout), ""
    outcome = Outcome("", stop_reason="timeout")
    while not running.done():
        left = limit - sampler.environment_s
        if left <= 0:
            running.cancel()
            await asyncio.wait({running}, timeout=1.0)  # it may refuse to end
            break
        await asyncio.wait({running}, timeout=left)
    if running.done() and not running.cancelled():
        failure = running.exception()
        if failure is None:
            outcome = running.result()
        elif isinstance(failure, LimitReached):
            outcome = Outcome("", stop_reason=failure.reason)
        elif isinstance(failure, _EngineFailed):
            raise failure
        else:
            known = isinstance(failure, EnvironmentFault)
            error = str(failure) if known else f"{type(failure).__name__}: {first_line(failure)}"
            outcome = Outcome("", stop_reason="environment_error")
    elif not sampler.recorder.num_turns:  # the policy cannot have caused it
        error = f"no turn within {spec.episode_timeout}"
        outcome = Outcome("", stop_reason="environment_error")
    return recorded(task, member, sampler, outcome, error)


def recorded(task: Task, member: int, sampler: EpisodeSampler, outcome: Outcome, error: str = "") -> Episode:
    """The episode of an outcome and the recorded tokens."""
    times = {
        "seconds/policy": sampler.policy_s,
        "seconds/waiting": sampler.waiting_s,
        "seconds/environment": sampler.environment_s,
    }
    sequences = sampler.recorder.sequences(outcome.turn_rewards)
    counts = {"num_turns": float(sampler.recorder.num_turns), "num_sequences": float(len(sequences))}
    return Episode(
        task=task,
        member=member,
        sequences=sequences,
        response=outcome.response,
        stop_reason=outcome.stop_reason,
        reward=outcome.reward,
        error=error or ("" if sequences else "the policy sampled nothing"),
        metrics=counts | times | dict(outcome.metrics),
        messages=outcome.messages,
    )
