"""Workers play one episode after the other; what an episode leaves behind reaches no other one."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlctl.environment.instances import Instance, Instances, TimedOut
from rlctl.environment.protocol import EnvironmentFault
from tests.scripted import SAMPLING, ScriptedEngine, asked, one_after_the_other, played, source_of
from tests.unit.environment.test_instances import assert_ends

CODE = """
import asyncio, os, signal, subprocess, sys, tempfile, threading, time
COUNT = 0

class Game:
    made = 0

    def __init__(self):
        Game.made += 1
        self.own = 0
    def pid(self): return os.getpid()
    def count(self):
        global COUNT
        COUNT += 1
        self.own += 1
        return f"{COUNT} {self.made} {self.own}"
    def nothing(self): pass
    def raises(self): raise ValueError("no")
    def hang(self): time.sleep(60)
    def child(self): subprocess.Popen(["sleep", "300"])
    def zombie(self): subprocess.Popen(["true"]); time.sleep(0.05)
    def daemon(self): subprocess.run(["setsid", "--fork", "sleep", "300"])
    def thread(self): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    def short_thread(self): threading.Thread(target=time.sleep, args=(0.01,)).start()
    def folder(self): os.chdir("/")
    def no_folder(self):
        os.chdir(folder := tempfile.mkdtemp()); os.rmdir(folder)
    def variable(self): os.environ["LEFT"] = "1"
    def ends(self): os._exit(3)
    def leaves(self): raise SystemExit
    def finished(self): subprocess.run(["true"])
    def memory(self): Game.kept = bytearray(os.urandom(1) * (300 << 20))
    async def pool(self): return await asyncio.to_thread(lambda: "from a thread")
    async def stuck_pool(self):
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
        await asyncio.sleep(0.01)
    async def task(self):
        async def later():
            await asyncio.sleep(0.2)
            os._exit(9)
        Game.task = asyncio.ensure_future(later())
        await asyncio.sleep(0)
"""


@pytest.fixture(scope="module")
def instances(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instances]:
    file = tmp_path_factory.mktemp("workers") / "game.py"
    file.write_text(CODE)
    found = Instances(str(file), "Game")
    yield found
    found.close()


async def said(instance: Instance, method: str, timeout_s: float = 30.0) -> str:
    """What a method returned, or its error."""
    found = await instance.call(method, {}, timeout_s=timeout_s, most=100)
    return str(found.get("text") or found.get("error") or "")


def pids_around(instances: Instances, method: str) -> list[str]:
    """The process of an episode, and that of the next one, after an episode that calls `method`."""

    async def main() -> list[str]:
        pids = []
        for _ in range(2):
            async with instances.instance() as instance:
                pids.append(await said(instance, "pid"))
                if len(pids) == 1:
                    await said(instance, method)
        return pids

    return asyncio.run(asyncio.wait_for(main(), 60))


LEAVE_NOTHING = ("nothing", "raises", "leaves", "finished", "short_thread", "pool", "task")


@pytest.mark.parametrize("method", LEAVE_NOTHING)
def test_the_next_episode_has_the_same_process(instances: Instances, method: str) -> None:
    first, second = pids_around(instances, method)
    assert first == second
    assert pids_around(instances, "nothing") == [first, first], "in another event loop, too"


LEAVES = ("child", "daemon", "thread", "folder", "no_folder", "variable", "stuck_pool")


@pytest.mark.parametrize("method", LEAVES)
def test_after_an_episode_that_leaves_something_there_is_a_fresh_process(
    instances: Instances, method: str
) -> None:
    first, second = pids_around(instances, method)
    assert first != second
    assert_ends(int(first))


def test_a_process_that_grows_is_replaced(instances: Instances) -> None:
    pids_around(instances, "nothing")  # the memory after its first episode counts
    first, second = pids_around(instances, "memory")
    assert first != second


@pytest.mark.parametrize(("method", "error"), [("hang", TimedOut), ("ends", EnvironmentFault)])
def test_a_call_that_hangs_or_ends_the_process_touches_no_other_episode(
    instances: Instances, method: str, error: type[Exception]
) -> None:
    async def main() -> None:
        async with instances.instance() as other:
            pids = {await said(other, "pid")}
            async with instances.instance() as one:
                pids.add(pid := await said(one, "pid"))
                with pytest.raises(error):
                    await said(one, method, 0.2 if method == "hang" else 30.0)
            assert_ends(int(pid))
            assert await said(other, "pid") in pids
            async with instances.instance() as later:
                pids.add(await said(later, "pid"))
            assert len(pids) == 3

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_episode_that_raises_ends_its_process(instances: Instances) -> None:
    """As after a fault, or when the episode is cancelled."""

    pids: list[str] = []

    async def main() -> None:
        async with instances.instance() as one:
            pids.append(await said(one, "pid"))
            raise EnvironmentFault("reset raised")

    with pytest.raises(EnvironmentFault):
        asyncio.run(asyncio.wait_for(main(), 60))
    assert_ends(int(pids[0]))


def test_episodes_share_the_module_and_no_instance(instances: Instances) -> None:
    pids_around(instances, "daemon")  # the next process is fresh

    async def main() -> list[str]:
        counted = []
        for _ in range(3):
            async with instances.instance() as instance:
                counted += [await said(instance, "count"), await said(instance, "count")][1:]
        return counted

    first, second, third = (list(map(int, text.split())) for text in asyncio.run(main()))
    assert (second[0] - first[0], third[0] - second[0]) == (2, 2)
    assert (second[1] - first[1], third[1] - second[1]) == (1, 1)
    assert first[2] == second[2] == third[2] == 2


def test_episodes_at_the_same_time_have_processes_of_their_own(instances: Instances) -> None:
    async def episode() -> str:
        async with instances.instance() as instance:
            pid = await said(instance, "pid")
            await asyncio.sleep(0.05)
            return pid

    async def main() -> list[str]:
        return await asyncio.gather(*(episode() for _ in range(6)))

    assert len(set(asyncio.run(main()))) == 6
    assert len(set(asyncio.run(main()))) == 6


def test_a_worker_that_was_killed_while_it_waited_is_replaced(instances: Instances) -> None:
    first, _ = pids_around(instances, "nothing")
    supervisor = psutil.Process(int(first)).ppid()
    os.kill(int(first), 9)
    assert_ends(int(first))
    assert_ends(supervisor)  # it holds the socket; an episode that comes before its end is excluded
    assert first not in pids_around(instances, "nothing")


def test_a_changed_file_ends_waiting_workers_and_changes_no_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "game.py"
    file.write_text(CODE)
    instances = Instances(str(file), "Game")
    try:
        first, again = pids_around(instances, "nothing")
        file.write_text(CODE.replace("def pid(self): return os.getpid()", "def pid(self): return 0"))
        with caplog.at_level(logging.WARNING):
            second, third = pids_around(instances, "nothing")
        assert first == again != second == third != "0"
        assert caplog.text.count("goes on with the code that it began with") == 1
        assert_ends(int(first))
    finally:
        instances.close()


COUNTS = """
    COUNT = 0

    class Game:
        def reset(self) -> str:
            global COUNT
            COUNT += 1
            return f" episode {COUNT}"

        def get_reward(self) -> float:
            return 1.0
"""


@pytest.mark.parametrize("is_fresh", [False, True])
def test_the_key_gives_every_episode_a_process(tmp_path: Path, is_fresh: bool) -> None:
    source = source_of(tmp_path, COUNTS, fresh_process=is_fresh, concurrency=1)
    engine = ScriptedEngine(one_after_the_other("done"))
    try:
        for _ in range(2):
            episodes = source.sample(engine, [(asked(), member) for member in range(2)], SAMPLING, 1)
            assert [episode.error for episode in episodes] == ["", ""]
    finally:
        source.close()
    said = ["".join(c for c in text if c.isdigit()) for text in engine.read]
    assert said == (["1"] * 4 if is_fresh else ["1", "2", "3", "4"])


def test_time_of_the_class_and_of_the_machinery_are_apart(tmp_path: Path) -> None:
    code = """
    import time

    class Game:
        def reset(self) -> None:
            time.sleep(0.2)
    """
    [episode], _ = played(tmp_path, code, one_after_the_other("done"))
    assert episode.metrics["seconds/environment"] >= 0.2
    assert episode.metrics["seconds/machinery"] >= 0.0
    code = "class Game:\n    def reset(self) -> None: ...\n"
    [episode], _ = played(tmp_path, code, one_after_the_other("done"))
    assert episode.metrics["seconds/machinery"] > episode.metrics["seconds/environment"] >= 0.0
