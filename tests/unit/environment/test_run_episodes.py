"""Episodes that run at the same time: their order, their batches, their limits and their failures."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlctl.batch import Episode, Task, Turn
from rlctl.environment import run_episodes as run_module
from rlctl.environment.protocol import EnvironmentFault, LimitReached, Outcome, Sampler
from rlctl.environment.run_episodes import run_episodes
from rlctl.episodes import Episodes
from rlctl.errors import RunFailure
from rlctl.rollout.protocol import Sampling
from rlctl.rollout.seeds import turn_seed
from rlctl.run_spec.environment import EnvironmentSpec
from rlctl.train.stream import RolloutStream
from tests.episodes import RandomEngine, same, task_of

SAMPLING = Sampling(max_response_length=4)


class Script:
    """An environment whose episodes are what this coroutine does."""

    def __init__(self, play: Callable[[Task, Sampler], Awaitable[Outcome]]) -> None:
        self.run = play

    def close(self) -> None: ...


class Engine(RandomEngine):
    """Answers every request with one token: the number of tokens that it read."""

    def _turn(self, request, sampling) -> Turn:
        del sampling
        count = min(request.max_tokens, 2)
        ids = torch.full((count,), len(request.token_ids))
        return Turn(ids, -torch.ones(count), torch.zeros(count, dtype=torch.int64), "stop")


async def speak(sampler: Sampler, turns: int, context: list[int] | None = None) -> list[int]:
    """So many turns, with one token of the environment after each."""
    context = context or [1, 2]
    for _ in range(turns):
        turn = await sampler.sample(context)
        context = [*context, *turn.token_ids.tolist(), 3]
    return context


def episodes_of(play, *, groups: int = 2, n: int = 2, engine=None, context_length: int = 100, **given):
    spec = EnvironmentSpec(**given)
    members = [(task_of(group), member) for group in range(groups) for member in range(n)]
    return run_episodes(Script(play), engine or Engine(), members, SAMPLING, 7, spec, context_length)


def test_episodes_are_in_order_whoever_ends_first() -> None:
    async def play(task: Task, sampler: Sampler) -> Outcome:
        await asyncio.sleep(0.05 * (2 - task.group_id))
        await speak(sampler, 1 + task.group_id)
        return Outcome(f"r{task.group_id}", reward=1.0, metrics={"own": 2.0})

    found = episodes_of(play, groups=3)
    assert [(e.task.group_id, e.member) for e in found] == [(g, m) for g in range(3) for m in range(2)]
    assert [(e.response, e.reward, e.error, e.stop_reason) for e in found[::2]] == [
        (f"r{group}", 1.0, "", "completed") for group in range(3)
    ]
    assert [e.metrics["num_turns"] for e in found[::2]] == [1.0, 2.0, 3.0]
    assert found[0].metrics["own"] == 2.0
    assert all(e.metrics["seconds/environment"] >= 0.04 * (2 - e.task.group_id) for e in found)


def test_a_turn_has_the_seed_of_its_group_member_and_number() -> None:
    async def play(task: Task, sampler: Sampler) -> Outcome:
        await speak(sampler, 2)
        return Outcome("")

    engine = Engine()
    episodes_of(play, engine=engine)
    seeds = {request.seed for call in engine.calls for request in call}
    assert seeds == {turn_seed(7, g, m, t) for g in range(2) for m in range(2) for t in range(2)}


@pytest.mark.parametrize("concurrency", [3, 4, 256])
def test_in_lockstep_batches_do_not_depend_on_who_is_faster(concurrency: int) -> None:
    """Episodes of unlike numbers of turns, in an environment of random speed; some fail or hang."""

    def batches(seed: int) -> tuple[list[list[int]], list[Episode]]:
        draw = random.Random(seed)

        async def play(task: Task, sampler: Sampler) -> Outcome:
            context = [1, 2, 3 + task.group_id]
            for _ in range(1 + task.group_id % 4):
                await asyncio.sleep(draw.random() * 0.01)
                context = await speak(sampler, 1, context)
            if task.group_id == 1:
                raise EnvironmentFault("refused")
            if task.group_id == 2:
                await asyncio.sleep(60)
            await asyncio.sleep(draw.random() * 0.01)
            return Outcome("")

        engine = RandomEngine()
        options = {"lockstep": True, "concurrency": concurrency, "episode_timeout": "0.5s"}
        found = episodes_of(play, groups=6, engine=engine, **options)
        return [[request.seed for request in call] for call in engine.calls], found

    first, episodes = batches(0)
    for seed in (1, 2):
        again, others = batches(seed)
        assert again == first
        assert same([e.sequences for e in others], [e.sequences for e in episodes])
    if concurrency == 256:
        assert [len(batch) for batch in first] == [12, 8, 4, 2]
    assert max(map(len, first)) <= concurrency


@pytest.mark.parametrize("waits", [True, False])
def test_a_batch_waits_for_turns_that_are_about_to_come(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch takes as long for one turn as for all."""
    monkeypatch.setattr(run_module, "_PATIENCE", 100.0 if waits else 0.0)

    async def play(task: Task, sampler: Sampler) -> Outcome:
        context = [1, 2]
        for turn in range(2):
            for _ in range(20 * ((task.group_id + turn) % 3)):  # environments of unlike speed
                await asyncio.sleep(0)
            context = await speak(sampler, 1, context)
        return Outcome("")

    engine = Engine()
    episodes_of(play, groups=3, engine=engine)
    found = [len(call) for call in engine.calls]
    assert found == [6, 6] if waits else found[0] < 6


def test_a_turn_that_is_given_up_while_its_batch_waits_is_not_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the client of an agent runs out of patience first: there may be nothing left to sample."""
    monkeypatch.setattr(run_module, "_PATIENCE", 0.2)
    given_up = asyncio.Event()

    async def play(task: Task, sampler: Sampler) -> Outcome:
        if task.group_id == 0:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(sampler.sample([1, 2]), 0.05)
            await asyncio.sleep(0.3)  # the batch's patience ends with no turn
            given_up.set()
        elif task.group_id == 1:
            await asyncio.sleep(0.1)
            raise EnvironmentFault("refused")  # the engine looks at who waits: nobody
        await given_up.wait()
        await speak(sampler, 1)
        return Outcome("")

    engine = Engine()
    found = episodes_of(play, groups=3, n=1, engine=engine)
    assert [e.error for e in found] == ["", "refused", ""]
    assert all(engine.calls)


def test_without_lockstep_a_slow_episode_does_not_hold_the_others() -> None:
    others_done = threading.Event()

    async def play(task: Task, sampler: Sampler) -> Outcome:
        if task.group_id == 0:
            await asyncio.to_thread(others_done.wait, 60)
        await speak(sampler, 3)
        if task.group_id == 1:
            others_done.set()
        return Outcome("")

    assert [e.metrics["num_turns"] for e in episodes_of(play, n=1)] == [3.0, 3.0]


def test_no_more_episodes_run_at_a_time_than_allowed() -> None:
    live, most = 0, 0

    async def play(task: Task, sampler: Sampler) -> Outcome:
        nonlocal live, most
        live += 1
        most = max(most, live)
        await speak(sampler, 2)
        live -= 1
        return Outcome("")

    episodes_of(play, groups=4, concurrency=3)
    assert most == 3


@pytest.mark.parametrize(
    ("reason", "num_turns", "given"),
    [
        ("max_turns", 3, {"max_turns": 3}),
        ("max_tokens", 3, {"max_episode_tokens": 5}),
        ("max_turns", 4, {"max_turns": 4, "max_episode_tokens": 8}),  # both: this one is checked first
        ("context_overflow", 3, {"context_length": 10}),
    ],
)
def test_each_limit_ends_an_episode_with_its_reason(reason: str, num_turns: int, given) -> None:
    async def play(task: Task, sampler: Sampler) -> Outcome:
        await speak(sampler, 100)
        raise AssertionError

    given = {"max_turns": 50} | given
    for episode in episodes_of(play, **given):
        assert (episode.stop_reason, episode.error, episode.reward) == (reason, "", 0.0)
        assert episode.metrics["num_turns"] == num_turns
        longest = given.get("max_episode_tokens", 100)
        assert episode.num_sampled <= longest
        assert episode.num_tokens <= given.get("context_length", 100)


def test_an_environment_may_answer_to_a_limit() -> None:
    async def play(task: Task, sampler: Sampler) -> Outcome:
        try:
            await speak(sampler, 9)
        except LimitReached as limit:
            return Outcome("so far", reward=0.5, stop_reason=limit.reason)
        raise AssertionError

    assert {(e.response, e.reward, e.stop_reason) for e in episodes_of(play, max_turns=2)} == {
        ("so far", 0.5, "max_turns")
    }


def test_an_environment_that_hangs_before_the_first_turn_is_at_fault_and_later_it_is_not() -> None:
    """The policy cannot have caused the first; it may have caused the second, with what it wrote."""

    async def play(task: Task, sampler: Sampler) -> Outcome:
        await speak(sampler, task.group_id)
        await asyncio.sleep(60)
        return Outcome("")

    before, after = episodes_of(play, n=1, episode_timeout="0.2s", lockstep=True)
    assert (before.stop_reason, before.reward) == ("environment_error", None)
    assert "no turn within" in before.error
    assert (after.stop_reason, after.reward, after.error) == ("timeout", 0.0, "")
    assert len(after.sequences) == 1


def test_the_time_of_the_policy_is_not_the_episodes() -> None:
    class Slow(Engine):
        def sample(self, requests, sampling):
            threading.Event().wait(0.3)
            return super().sample(requests, sampling)

    async def play(task: Task, sampler: Sampler) -> Outcome:
        await speak(sampler, 3)
        return Outcome("")

    found = episodes_of(play, engine=Slow(), episode_timeout="0.25s")
    assert {e.stop_reason for e in found} == {"completed"}
    assert all(e.metrics["seconds/policy"] >= 0.85 for e in found)
    assert all(e.metrics["seconds/environment"] < 0.25 for e in found)


@pytest.mark.parametrize(
    ("failure", "named"),
    [
        (EnvironmentFault("the server refused"), "the server refused"),
        (KeyError("x"), "KeyError: 'x'"),
        (TimeoutError(), "TimeoutError"),
        (asyncio.CancelledError(), "cancelled"),
        (ValueError("a\nb"), "ValueError: a"),
    ],
)
def test_a_fault_excludes_an_episode_and_is_not_reward_0(failure: Exception, named: str) -> None:
    async def play(task: Task, sampler: Sampler) -> Outcome:
        await speak(sampler, 1)
        if task.group_id == 0:
            raise failure
        return Outcome("", reward=1.0)

    found = episodes_of(play, n=1, lockstep=True)
    assert [(e.reward, e.stop_reason) for e in found] == [(None, "environment_error"), (1.0, "completed")]
    assert named in found[0].error
    assert found[1].error == ""


def test_rewards_of_turns_are_part_of_the_episodes_reward() -> None:
    """So that grading, metrics and dynamic sampling see them."""

    async def play(task: Task, sampler: Sampler) -> Outcome:
        await speak(sampler, 2)
        return Outcome("", reward=1.0 if task.group_id else None, turn_rewards=[0.25, 0.5])

    found = episodes_of(play, n=1)
    assert [episode.reward for episode in found] == [0.75, 1.75]
    assert [episode.sequences[0].rewards.sum() for episode in found] == [0.75, 0.75]


def test_numbers_of_numpy_can_be_saved_with_the_groups_that_wait(tmp_path: Path) -> None:
    """A checkpoint is read without executing code: of numbers and texts, it takes Python's own."""
    message = {"role": "user", "content": np.str_("hi"), "score": np.int64(3)}

    async def play(task: Task, sampler: Sampler) -> Outcome:
        await speak(sampler, 1)
        return Outcome(
            np.str_("yes"), np.float32(0.5), [np.float64(0.25)], "completed", (message,), {"x": np.int64(3)}
        )

    stream = RolloutStream(lambda *_: Episodes.of(episodes_of(play, groups=1)), ahead=1, last_step=9)
    stream.take(1)
    stream.save(tmp_path, 0)
    resumed = RolloutStream(lambda *_: [], ahead=1, last_step=9)
    resumed.resume(1, tmp_path, 0)
    group = resumed.take(2)
    assert [(e.response, e.reward, e.metrics["x"]) for e in group] == [("yes", 0.75, 3.0)] * 2
    assert group[0].messages == ({"role": "user", "content": "hi", "score": "3"},)


@pytest.mark.parametrize(
    ("outcome", "named"),
    [
        (None, "NoneType"),
        (Outcome("", stop_reason="tired"), "'tired' is not one of"),
        (Outcome("", turn_rewards=[1.0]), "1 rewards of 2 turns"),
        (Outcome("", reward=float("nan")), "not finite"),
        (Outcome("", turn_rewards=[1.0, float("inf")]), "not finite"),
        (Outcome("", metrics={"depth": "three"}), "could not convert string to float"),
        (Outcome("", metrics={"depth": float("nan")}), "not finite: None, [], {'depth': nan}"),
        (Outcome(None), "response is NoneType"),
    ],
)
def test_an_outcome_that_no_environment_may_return_is_a_fault(outcome, named: str) -> None:
    async def play(task: Task, sampler: Sampler) -> Outcome:
        await speak(sampler, 2)
        return outcome

    for episode in episodes_of(play):
        assert named in episode.error
        assert episode.reward is None


def test_an_environment_that_is_not_async_is_a_fault() -> None:
    for episode in episodes_of(lambda task, sampler: Outcome("")):
        assert "TypeError: object Outcome" in episode.error


def test_an_error_of_the_engine_ends_the_run_with_its_own_message() -> None:
    """Even if an environment catches every exception."""

    class Broken(Engine):
        def sample(self, requests, sampling):
            if len(self.calls) == 2:
                raise RunFailure("out of memory", where="rollout")
            return super().sample(requests, sampling)

    async def play(task: Task, sampler: Sampler) -> Outcome:
        try:
            await speak(sampler, 9)
        except Exception:
            return Outcome("all is well", reward=1.0)
        return Outcome("")

    async def careless(task: Task, sampler: Sampler) -> Outcome:
        try:
            await speak(sampler, 9)
        except BaseException:
            return Outcome("all is well", reward=1.0)
        return Outcome("")

    for each in (play, careless):
        with pytest.raises(RunFailure, match="out of memory"):
            episodes_of(each, engine=Broken())


def test_a_turn_that_the_engine_aborts_ends_its_episode() -> None:
    async def play(task: Task, sampler: Sampler) -> Outcome:
        await speak(sampler, 4)
        return Outcome("", reward=1.0)

    engine = Engine()
    engine.aborts = {(2, 1)}  # the second turn of the second episode
    first, second = episodes_of(play, groups=1, engine=engine, lockstep=True)
    assert (first.stop_reason, first.metrics["num_turns"]) == ("completed", 4.0)
    assert second.aborted
    assert second.metrics["num_turns"] == 2.0
    assert second.error == ""


def test_an_episode_that_says_nothing_is_excluded() -> None:
    async def play(task: Task, sampler: Sampler) -> Outcome:
        return Outcome("", reward=1.0)

    assert {e.error for e in episodes_of(play)} == {"the policy sampled nothing"}


def test_what_outlives_its_episode_samples_no_more() -> None:
    tasks = []

    async def play(task: Task, sampler: Sampler) -> Outcome:
        async def later() -> None:
            await asyncio.sleep(0.05)
            await speak(sampler, 1)

        await speak(sampler, 1)
        tasks.append(asyncio.create_task(later()))
        if task.group_id:
            await asyncio.sleep(0.15)  # the others' loop goes on
        return Outcome("")

    engine = Engine()
    episodes_of(play, n=1, engine=engine, max_turns=1)
    assert sum(map(len, engine.calls)) == 2


def test_turns_of_one_episode_are_sampled_one_after_the_other() -> None:
    async def play(task: Task, sampler: Sampler) -> Outcome:
        await asyncio.gather(*(speak(sampler, 1) for _ in range(3)))
        return Outcome("")

    engine = Engine()
    for episode in episodes_of(play, engine=engine, lockstep=True):
        assert [s.turns.tolist() for s in episode.sequences] == [[0, 0], [1, 1], [2, 2]]
    assert [len(call) for call in engine.calls] == [4, 4, 4]


def test_it_runs_inside_of_a_running_loop() -> None:
    """As in a notebook."""

    async def play(task: Task, sampler: Sampler) -> Outcome:
        await speak(sampler, 1)
        return Outcome("")

    async def cell() -> list[Episode]:
        return episodes_of(play)

    assert len(asyncio.run(cell())) == 4


def test_with_an_engine_for_several_threads_a_slow_turn_holds_no_other_one() -> None:
    """Which is sampled while the other episode ends; and a failure of the engine ends all."""

    class Concurrent(Engine):
        is_concurrent = True

        def __init__(self, fails: bool) -> None:
            super().__init__()
            self.others_ended, self.fails = threading.Event(), fails

        def sample(self, requests, sampling) -> list[Turn]:
            if requests[0].seed == turn_seed(7, 0, 0, 0):
                assert self.others_ended.wait(60)
                if self.fails:
                    raise RunFailure("the engine is gone")
            return super().sample(requests, sampling)

    async def play(task: Task, sampler: Sampler) -> Outcome:
        await speak(sampler, 3)
        if task.group_id == 1:
            engine.others_ended.set()
        return Outcome("", reward=float(task.group_id))

    engine = Concurrent(fails=False)
    assert [e.reward for e in episodes_of(play, n=1, engine=engine)] == [0.0, 1.0]
    engine = Concurrent(fails=True)
    with pytest.raises(RunFailure, match="the engine is gone"):
        episodes_of(play, n=1, engine=engine)
