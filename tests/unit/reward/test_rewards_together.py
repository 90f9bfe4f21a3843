"""Rewards that wait run at the same time; one that fails, hangs or ends the process changes no other one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.reward.pool import GradingPool
from rlctl.reward.protocol import Failure, Sample

#: A call returns only if as many as the file says are in flight: they wait for each other.
CODE = """
import asyncio, functools, os, threading, time
TOGETHER = 12
LOOPS, IN_FLIGHT, MOST = set(), 0, 0
CLIENT = None
BARRIER = threading.Barrier(6)

class Client:
    def __init__(self):
        self.loop, self.here, self.all_here = asyncio.get_running_loop(), 0, asyncio.Event()
    async def meet(self):
        assert asyncio.get_running_loop() is self.loop, "a client of the module belongs to one loop"
        self.here += 1
        if self.here >= TOGETHER:
            self.all_here.set()
        await self.all_here.wait()

async def meets(response):
    global CLIENT
    CLIENT = CLIENT or Client()
    await CLIENT.meet()
    return float(len(response))

async def uneven(response, ground_truth):
    if response == ground_truth: return 1.0
    if response == "raises": raise ConnectionError("refused")
    if response == "dies": os._exit(3)
    if response == "awaits": await asyncio.sleep(1000)
    if response == "blocks": time.sleep(1000)
    if response == "cancels": raise asyncio.CancelledError
    if response == "text": return "1"
    await asyncio.sleep(0.02)
    return 0.5

async def of_group(completions, **columns):
    await meets("x")
    return [float(len(text)) for text in completions]

class Judge:
    async def __call__(self, response):
        return await meets(response)
judge = Judge()
partly = functools.partial(meets)

def threads(response):
    BARRIER.wait(30)
    return float(len(response))

def counts(response):
    global IN_FLIGHT, MOST
    IN_FLIGHT += 1
    MOST = max(MOST, IN_FLIGHT)
    time.sleep(0.01)
    IN_FLIGHT -= 1
    return float(MOST)

def own_loop(response):
    async def inner():
        await asyncio.sleep(0.01)
        return float(len(response))
    return asyncio.run(inner())

def waits(response):
    time.sleep(0.05)
    return 1.0
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("together") / "mine.py"
    found.write_text(CODE)
    return found


@pytest.fixture
def pools(file: Path) -> Iterator[object]:
    started: list[GradingPool] = []

    def start(name: str, deadline_s: float = 20.0, threads: int = 1) -> GradingPool:
        started.append(GradingPool(f"{file}:{name}", deadline_s=deadline_s, num_workers=1, threads=threads))
        started[-1].check()
        return started[-1]

    yield start
    for pool in started:
        pool.close()


def of(*responses: str) -> list[Sample]:
    return [Sample(response, "right", prompt=str(place)) for place, response in enumerate(responses)]


@pytest.mark.parametrize("name", ["meets", "judge", "partly"])
def test_calls_that_wait_for_each_other_all_return(pools, name: str) -> None:
    pool = pools(name)
    responses = ["x" * length for length in range(12)]
    for _ in range(2):  # the second batch uses the client of the first
        assert pool.grade(of(*responses)) == [float(length) for length in range(12)]


def test_calls_with_all_responses_of_a_prompt_wait_together(pools) -> None:
    samples = [Sample("x" * place, "", prompt=str(place // 2)) for place in range(24)]
    assert pools("of_group").grade(samples) == [float(place) for place in range(24)]


@pytest.mark.parametrize(
    ("response", "kind", "text"),
    [
        ("raises", "error", "refused"),
        ("text", "error", "not a number"),
        ("cancels", "error", "cancelled itself"),
        ("dies", "crash", "ended with code 3"),
        ("awaits", "time-out", "longer than"),
        ("blocks", "time-out", "longer than"),
    ],
)
def test_a_failure_is_that_of_its_call_only(pools, monkeypatch, response: str, kind: str, text: str) -> None:
    monkeypatch.setattr("rlctl.reward.pool._RESPONSE_S", 0.5)
    grades = pools("uneven", 1.5).grade(of("a", "b", response, "right", "c"))
    assert [grades[0], grades[1], grades[3], grades[4]] == [0.5, 0.5, 1.0, 0.5]
    failure = grades[2]
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.score) == (kind, None if kind == "error" else 0.0)
    assert text in failure.text


def test_a_plain_function_runs_in_threads_only_where_the_spec_says_so(pools) -> None:
    assert pools("threads", threads=6).grade(of(*["x"] * 12)) == [1.0] * 12
    assert pools("counts").grade(of(*["x"] * 5)) == [1.0] * 5


@pytest.mark.parametrize("threads", [1, 4])
def test_a_plain_function_may_have_a_loop_of_its_own(pools, threads: int) -> None:
    assert pools("own_loop", threads=threads).grade(of("a", "bb", "ccc")) == [1.0, 2.0, 3.0]


def test_a_function_that_waits_call_after_call_is_pointed_to_the_key_once(
    pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlctl.reward.pool._LONG_WAIT_S", 0.1)
    pool = pools("waits")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pool.grade(of(*"abcd"))
        pools("own_loop").grade(of("a"))
    assert caplog.text.count("set reward.threads") == 1
