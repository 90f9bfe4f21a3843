"""A busy machine is not the policy's fault: waiting for a processor takes nothing from its time limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl import processor_time
from rlctl.batch import Episode
from rlctl.environment.instances import Instances, TimedOut
from rlctl.processor_time import MachineBusy, TreeMeter, WaitMeter, seconds_left
from tests.scripted import asked, one_after_the_other, played

PROCESSOR = min(os.sched_getaffinity(0))
CODE = f"""
import os, subprocess, sys, threading, time
WORK = "import os, time\\nos.sched_setaffinity(0, [{PROCESSOR}])\\nwhile time.process_time() < 0.4: pass"

class Game:
    def __init__(self):
        os.sched_setaffinity(0, [{PROCESSOR}])
    def reset(self): pass
    def work(self) -> str:
        \"\"\"Computes.\"\"\"
        while time.thread_time() < 0.4: pass
        return "worked"
    def delegate(self) -> str:
        \"\"\"Lets a process compute.\"\"\"
        started = subprocess.Popen([sys.executable, "-S", "-c", WORK])
        started.wait()
        return "worked"
    def hang(self) -> str:
        \"\"\"Hangs.\"\"\"
        time.sleep(1000)
    def starve(self) -> str:
        \"\"\"Waits for its own threads and processes.\"\"\"
        for _ in range(6):
            subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        while True: pass
    def get_reward(self) -> float: return 1.0
"""


@contextlib.contextmanager
def busy(others: int) -> Iterator[None]:
    """That many other processes want the same processor."""
    code = f"import os\nos.sched_setaffinity(0, [{PROCESSOR}])\nwhile True: pass"
    command = [sys.executable, "-S", "-c", code]  # sessions get equal shares of a processor
    started = [subprocess.Popen(command, start_new_session=True) for _ in range(others)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def call(folder: Path, method: str, timeout_s: float) -> tuple[str, float]:
    """The result of a method, and the seconds that it took."""
    (folder / "game.py").write_text(CODE)
    instances = Instances(str(folder / "game.py"), "Game")

    async def main() -> tuple[str, float]:
        async with instances.instance() as instance:
            await instance.call("reset", {}, timeout_s=60, most=100)
            started = time.monotonic()
            answer = await instance.call(method, {}, timeout_s=timeout_s, most=100)
            return answer["text"], time.monotonic() - started

    try:
        return asyncio.run(main())
    finally:
        instances.close()


@pytest.mark.parametrize("method", ["work", "delegate"])
def test_a_call_may_wait_for_a_processor(tmp_path: Path, method: str) -> None:
    with busy(6):
        text, elapsed_s = call(tmp_path, method, 1.2)
    assert text == "worked"
    assert elapsed_s > 1.2  # without the others it would be done within the limit


def test_a_call_that_hangs_ends_at_its_limit_on_a_busy_machine(tmp_path: Path) -> None:
    with busy(3), pytest.raises(TimedOut):
        call(tmp_path, "hang", 0.5)


def test_a_call_that_keeps_the_processors_busy_itself_ends_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {PROCESSOR})
    with pytest.raises(TimedOut):
        call(tmp_path, "starve", 0.7)


def test_a_call_that_gets_no_processor_is_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_time, "STALLED", 3.0)
    with busy(8), pytest.raises(MachineBusy):
        call(tmp_path, "work", 0.3)


def play(folder: Path, tool: str, **spec: object) -> Episode:
    says = one_after_the_other(f'<tool_call>{{"name": "{tool}", "arguments": {{}}}}</tool_call>', "done")
    [episode], _ = played(folder, CODE, says, [asked()], **spec)
    return episode


def test_a_starved_episode_is_excluded_and_never_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limit of a call, and by that of the episode."""
    monkeypatch.setattr(processor_time, "STALLED", 1.5)
    with busy(8):
        for limit in ("tool_timeout", "episode_timeout"):
            episode = play(tmp_path, "work", **{limit: "1s"})
            assert "too busy" in episode.error, limit
            assert (episode.reward, episode.stop_reason) == (None, "environment_error")


def test_the_time_of_an_episode_stands_still_too(tmp_path: Path) -> None:
    with busy(5):
        episode = play(tmp_path, "work", episode_timeout="1s")
    assert (episode.error, episode.reward, episode.stop_reason) == ("", 1.0, "completed")


def test_an_episode_that_hangs_still_has_a_reward_of_0(tmp_path: Path) -> None:
    episode = play(tmp_path, "hang", episode_timeout="1s")
    assert (episode.error, episode.reward, episode.stop_reason) == ("", 0.0, "timeout")


def test_time_is_counted_without_waits() -> None:
    assert seconds_left(1.0, 3.0, 2.5) == 0.5
    assert seconds_left(1.0, 3.0, 1.5) == -0.5
    with pytest.raises(MachineBusy):
        seconds_left(1.0, 10.5, 10.0)
    assert seconds_left(1.0, 10.5, 9.0) < 0  # it is over: the machine was not too busy for that


def test_waits_are_measured_from_look_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the threads that were there before, the longest; never more than the time that passed."""
    clock, waits = [0.0], {"1": 5.0}
    monkeypatch.setattr(processor_time.time, "monotonic", lambda: clock[0])
    meter = WaitMeter(lambda: dict(waits))
    for now, seen, waited in (
        (1.0, {"1": 5.5}, 0.5),
        (2.0, {"1": 5.5, "2": 9.0}, 0.5),  # a new one
        (3.0, {"1": 5.7, "2": 9.1}, 0.7),
        (4.0, {"2": 99.0}, 1.7),  # more than has passed
        (5.0, {}, 1.7),
    ):
        clock[0], waits = now, seen
        meter.look()
        assert meter.waited == pytest.approx(waited)
    clock[0], waits = 6.0, {"2": 0.0}
    meter.look()
    clock[0], waits = 7.0, {"2": 1.0}
    meter.look(own_s=0.4)
    assert meter.waited == pytest.approx(1.7 + 1.0)
    clock[0], waits = 8.0, {"2": 2.0}
    meter.look(own_s=0.4)
    assert meter.waited == pytest.approx(1.7 + 1.0 + 0.6)


def test_without_processes_nothing_waits() -> None:
    meter = TreeMeter()
    meter.watch(2**22 + 1)  # no such process
    meter.look()
    assert meter.waited < 0.5
