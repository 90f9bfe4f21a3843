"""Runs the episodes of a batch at the same time: those that wait for the policy share its batches.

Episodes are coroutines of one thread. The engine samples in another thread, so that environments go on
meanwhile: a batch starts when no further turn came for a tenth of the last one's time, after all of it at the
latest. With `environment.lockstep` the engine waits until every episode waits for it; batches are then
the same in every run of a deterministic environment.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from rlctl.batch import Episode, Task, Turn
from rlctl.environment.instances import SharedProcessEnded
from rlctl.environment.protocol import (
    PROMPT_OVERLONG,
    STOP_REASONS,
    EnvironmentFault,
    LimitReached,
    Outcome,
)
from rlctl.environment.recording import Recorder
from rlctl.errors import first_line
from rlctl.processor_time import LOOKS, MachineBusy, TreeMeter, seconds_left
from rlctl.reward.protocol import exact_sum
from rlctl.rollout.protocol import ConcurrentSampler, Request
from rlctl.rollout.seeds import turn_seed
from rlctl.run_spec.base import seconds
from rlctl.tool_calls import encodable

if TYPE_CHECKING:
    from rlctl.environment.protocol import Environment
    from rlctl.rollout.protocol import ResponseSampler, Sampling
    from rlctl.run_spec.environment import EnvironmentSpec


#: Share of the last batch's seconds for which a batch waits for one more turn: its longest sets its time.
_PATIENCE = 0.1


@dataclass(slots=True)
class _Waiting:
    """A turn that waits for the policy."""

    key: tuple[int, int, int]  # group, member, turn: the order within a batch
    request: Request
    turn: asyncio.Future[Turn]
    started: float = 0.0


class Conductor:
    """Collects the turns that wait, and samples them in batches.

    Args:
        thread: in which the engine samples.
        num_episodes: episodes that have not ended.

    Attributes:
        failure: error of the engine, which ends all episodes.
    """

    def __init__(
        self,
        engine: ResponseSampler,
        sampling: Sampling,
        thread: Executor,
        spec: EnvironmentSpec,
        num_episodes: int,
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._thread = thread
        self._spec = spec
        self._num_episodes = num_episodes
        self.failure: Exception | None = None
        self._waiting: list[_Waiting] = []
        self._changed = asyncio.Event()
        self._sampling_now: set[asyncio.Task[None]] = set()
        self._batch_s = 1.0  # of the last batch

    async def sample(self, key: tuple[int, int, int], request: Request) -> tuple[Turn, float]:
        """The turn, and the seconds for which it waited for its batch to start."""
        waiting = _Waiting(key, request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._changed.set()
        asked = time.perf_counter()
        return await waiting.turn, waiting.started - asked

    def ended(self) -> None:
        """An episode has ended; another one takes its place, if there is one."""
        self._num_episodes -= 1
        self._changed.set()

    async def serve(self) -> None:
        """Samples until it is cancelled; an error of the engine ends all episodes that wait."""
        while True:
            await self._changed.wait()
            all_wait = self._all_wait()
            if not self._waiting or (self._spec.lockstep and not all_wait):
                continue
            patience = _PATIENCE * self._batch_s
            latest = time.perf_counter() + 10 * patience
            while self._waiting and not (all_wait or is_concurrent(self._engine)):
                try:
                    left = min(patience, latest - time.perf_counter())
                    await asyncio.wait_for(self._changed.wait(), left)
                except TimeoutError:
                    break
                all_wait = self._all_wait()
            self._all_wait()  # a turn that was given up changes nothing else
            if not self._waiting:
                continue
            batch = sorted(self._waiting, key=lambda one: one.key)
            self._waiting = []
            if is_concurrent(self._engine):
                self._sampling_now.update(asyncio.create_task(self._sample([one])) for one in batch)
            else:
                await self._sample(batch)

    def _all_wait(self) -> bool:
        """Whether no further turn can come now; without turns whose episodes have ended meanwhile."""
        self._changed.clear()
        self._waiting = [one for one in self._waiting if not one.turn.done()]
        return len(self._waiting) >= min(self._num_episodes, self._spec.concurrency)

    async def _sample(self, batch: list[_Waiting]) -> None:
        for waiting in batch:
            waiting.started = time.perf_counter()
        requests = [one.request for one in batch]
        try:
            loop = asyncio.get_running_loop()
            sample = partial(self._engine.sample, requests, self._sampling)
            turns = await loop.run_in_executor(self._thread, sample)
            self._batch_s = time.perf_counter() - batch[0].started
            for waiting, turn in zip(batch, turns, strict=True):
                if not waiting.turn.done():  # else its episode ran out of time
                    waiting.turn.set_result(turn)
        except Exception as error:
            self.failure = error
            for waiting in batch:
                if not waiting.turn.done():
                    waiting.turn.set_exception(_EngineFailed(str(error)))


def is_concurrent(engine: ResponseSampler) -> bool:
    """Whether several threads may call the engine at once; then no turn waits for others of its batch."""
    return isinstance(engine, ConcurrentSampler) and engine.is_concurrent


class _EngineFailed(BaseException):
    """Passes through environments, which may catch any `Exception`."""


class EpisodeSampler:
    """The `Sampler` of one episode: applies its limits, seeds its turns, and measures its seconds.

    Attributes:
        recorder: the tokens so far.
        is_aborted: the engine ended a turn.
        has_ended: no further turn is sampled.
        overlong: why the first prompt does not fit; empty: it does.
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
        max_prompt_length: int | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        self.is_alone = is_alone
        self._conductor = conductor
        self._task = task
        self._member = member
        self._seed = step_seed
        self._spec = spec
        self._context_length = context_length
        self._max_prompt = context_length - 1 if max_prompt_length is None else max_prompt_length
        self._of_turn = sampling.max_response_length
        self._budget = spec.max_episode_tokens or spec.max_turns * self._of_turn
        self._started = time.perf_counter()
        self._asked: float | None = None  # since when a turn is being sampled
        self._in_turn = asyncio.Lock()  # the turns of an episode have an order
        self._meter = TreeMeter()
        self.recorder = Recorder()
        self.policy_s = self.waiting_s = 0.0
        self.is_aborted = self.has_ended = False
        self.overlong = ""

    @property
    def environment_s(self) -> float:
        """Seconds so far without those of the policy."""
        now = time.perf_counter() if self._asked is None else self._asked
        return now - self._started - self.policy_s - self.waiting_s

    def watch(self, pid: int) -> None:
        """See `Sampler.watch`."""
        self._meter.watch(pid)

    def seconds_left(self) -> float:
        """Seconds until the time limit, if the episode's processes need not wait for a processor.

        Raises:
            MachineBusy: they waited for far longer than they worked.
        """
        self._meter.look()
        limit = seconds(self._spec.episode_timeout)
        return seconds_left(limit, self.environment_s, self._meter.waited)

    async def sample(
        self,
        token_ids: Sequence[int],
        max_tokens: int | None = None,
        shortened: Callable[[Turn], Turn] | None = None,
    ) -> Turn:
        """See `Sampler.sample`."""
        async with self._in_turn:
            return await self._sampled(token_ids, max_tokens or self._of_turn, shortened)

    async def _sampled(
        self, token_ids: Sequence[int], max_tokens: int, shortened: Callable[[Turn], Turn] | None
    ) -> Turn:
        number = self.recorder.num_turns
        left = self._budget - self.recorder.num_sampled
        if not number and len(token_ids) > self._max_prompt:
            self.overlong = f"its first prompt has {len(token_ids)} tokens, more than {self._max_prompt}"
            raise LimitReached(PROMPT_OVERLONG)
        is_late = self.environment_s > seconds(self._spec.episode_timeout)
        for reason, is_reached in (
            ("aborted", self.is_aborted),
            ("max_turns", number >= self._spec.max_turns),
            ("max_tokens", left <= 0),
            ("context_overflow", len(token_ids) >= self._context_length),
            ("timeout", self.has_ended or (is_late and self.seconds_left() <= 0)),
        ):
            if is_reached:
                raise LimitReached(reason)
        limit = min(self._of_turn, left, self._context_length - len(token_ids), max_tokens)
        request = Request(
            list(token_ids), turn_seed(self._seed, self._task.group_id, self._member, number), limit
        )
        self._asked = asked = time.perf_counter()
        try:
            turn, waited = await self._conductor.sample((self._task.group_id, self._member, number), request)
        finally:
            taken = time.perf_counter() - asked
            self._asked = None
            self.policy_s += taken
        self.waiting_s += waited
        self.policy_s -= waited
        if shortened and turn.finish_reason != "abort":
            turn = shortened(turn)
        self.recorder.add(token_ids, turn)
        if turn.finish_reason == "abort":
            self.is_aborted = True
            raise LimitReached("aborted")
        return turn


def run_episodes(
    environment: Environment,
    engine: ResponseSampler,
    members: Sequence[tuple[Task, int]],
    sampling: Sampling,
    step_seed: int,
    spec: EnvironmentSpec,
    context_length: int,
    max_prompt_length: int | None = None,
) -> list[Episode]:
    """The episodes with these tasks and indices within their groups, in that order.

    One whose first prompt has more than `max_prompt_length` tokens (None: does not leave a token of
    `context_length`) has `error` set and ends before anything is sampled.

    An episode that failed by a fault of the environment has `error` set: it is excluded, and never has a
    reward of 0 instead.

    Raises:
        RlctlError: the engine failed.
    """

    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    async def run_all(thread: Executor) -> list[Episode]:
        conductor = Conductor(engine, sampling, thread, spec, len(members))
        serving = asyncio.create_task(conductor.serve())
        slots = asyncio.Semaphore(spec.concurrency)

        async def one(task: Task, member: int) -> Episode:
            async with slots:
                limits = (spec, sampling, context_length, max_prompt_length)
                given = (conductor, task, member, step_seed, *limits)
                try:
                    return await _episode(environment, task, member, EpisodeSampler(*given), spec)
                except SharedProcessEnded:  # from its beginning
                    sampler = EpisodeSampler(*given, is_alone=True)
                    return await _episode(environment, task, member, sampler, spec)
                finally:
                    conductor.ended()

        try:
            episodes = await asyncio.gather(*(one(*each) for each in members))
        except _EngineFailed:
            episodes = []
        finally:
            serving.cancel()
        if conductor.failure:
            raise conductor.failure
        return episodes

    at_once = min(len(members), spec.concurrency) if is_concurrent(engine) else 1
    enter = partial(torch.cuda.set_device, device) if device else None
    with (
        ThreadPoolExecutor(at_once, "policy", enter) as thread,
        ThreadPoolExecutor(1, "episodes") as loop,  # a notebook's own loop runs in this thread
    ):
        return loop.submit(asyncio.run, run_all(thread)).result()


async def _episode(
    environment: Environment, task: Task, member: int, sampler: EpisodeSampler, spec: EnvironmentSpec
) -> Episode:
    """Runs one episode to its end, its limit, or its failure."""
    limit = left = seconds(spec.episode_timeout)
    outcome = _without_reward("timeout")

    async def run() -> Outcome:
        return await environment.run(task, sampler)

    running = asyncio.ensure_future(run())
    try:
        while not running.done():
            if left <= 0:
                running.cancel()
                await asyncio.wait({running}, timeout=1.0)  # it may refuse to end
                break
            await asyncio.wait({running}, timeout=max(min(left, limit / LOOKS), 0.05))
            left = left if running.done() else sampler.seconds_left()
        if running.done() and not running.cancelled():
            outcome = _checked(running.result(), sampler)
        elif left > 0:
            raise EnvironmentFault("it cancelled itself")
        elif not sampler.recorder.num_turns:  # the policy cannot have caused it
            raise EnvironmentFault(f"no turn within {spec.episode_timeout}")
    except LimitReached as reached:
        outcome = _without_reward(reached.reason)
    except SharedProcessEnded:
        raise
    except Exception as failure:
        if sampler.overlong:  # it could not speak
            return _overlong(task, member, sampler)
        known = isinstance(failure, EnvironmentFault | MachineBusy)
        error = str(failure) if known else f"{type(failure).__name__}: {first_line(failure)}"
        return _recorded(task, member, sampler, Outcome("", stop_reason="environment_error"), error)
    finally:
        sampler.has_ended = True
        running.cancel()
    if sampler.overlong:
        return _overlong(task, member, sampler)
    error = "" if sampler.recorder.num_sampled else "the policy sampled nothing"
    if sampler.is_aborted:
        outcome = replace(outcome, stop_reason="aborted")
        error = ""
    return _recorded(task, member, sampler, outcome, error)


def _overlong(task: Task, member: int, sampler: EpisodeSampler) -> Episode:
    return _recorded(task, member, sampler, Outcome("", stop_reason=PROMPT_OVERLONG), sampler.overlong)


def _without_reward(stop_reason: str) -> Outcome:
    """Of an episode that a limit ended before its environment could speak of it."""
    return Outcome("", reward=0.0, stop_reason=stop_reason)


def _checked(outcome: Outcome, sampler: EpisodeSampler) -> Outcome:
    """The outcome in Python's own types, which checkpoints take, if an environment may return it; its reward
    includes those of turns.

    Raises:
        EnvironmentFault: it may not.
    """
    if not isinstance(outcome, Outcome):
        raise EnvironmentFault(f"it returned {type(outcome).__name__}, not an Outcome")
    if not isinstance(outcome.response, str):
        raise EnvironmentFault(f"its response is {type(outcome.response).__name__}, not text")
    if outcome.stop_reason not in STOP_REASONS:
        raise EnvironmentFault(f"stop_reason {outcome.stop_reason!r} is not one of {', '.join(STOP_REASONS)}")
    rewards = [float(reward) for reward in outcome.turn_rewards]
    expected = sampler.recorder.num_turns
    if len(rewards) not in (0, expected):
        raise EnvironmentFault(f"it returned {len(rewards)} rewards of {expected} turns")
    has_reward = outcome.reward is not None or bool(rewards)
    reward = exact_sum([*rewards, float(outcome.reward or 0.0)]) if has_reward else None
    metrics = {name: float(number) for name, number in outcome.metrics.items()}
    if not all(map(math.isfinite, (reward or 0.0, *rewards, *metrics.values()))):
        raise EnvironmentFault(f"a number is not finite: {outcome.reward}, {rewards}, {metrics}")
    response, messages = encodable([outcome.response, outcome.messages])
    return Outcome(
        response=response,
        reward=reward,
        turn_rewards=rewards,
        stop_reason=outcome.stop_reason,
        messages=tuple(messages),
        metrics=metrics,
    )


def _recorded(task: Task, member: int, sampler: EpisodeSampler, outcome: Outcome, error: str) -> Episode:
    """The episode of an outcome and the recorded tokens."""
    sequences = sampler.recorder.sequences(outcome.turn_rewards)
    counts = {"num_turns": float(sampler.recorder.num_turns), "num_sequences": float(len(sequences))}
    rest_s = sampler.environment_s
    own_s = min(rest_s, outcome.metrics.get("seconds/environment", rest_s))
    times = {
        "seconds/policy": sampler.policy_s,
        "seconds/waiting": sampler.waiting_s,
        "seconds/environment": own_s,
        "seconds/machinery": rest_s - own_s,
    }
    return Episode(
        task=task,
        member=member,
        sequences=sequences,
        response=outcome.response,
        stop_reason=outcome.stop_reason,
        reward=outcome.reward,
        error=error,
        metrics=counts | dict(outcome.metrics) | times,
        messages=outcome.messages,
    )
