"""Processes of a user's environment: nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from rlctl.environment.instances import Instances, TimedOut
from rlctl.environment.protocol import EnvironmentFault

CODE = """
import os, subprocess, time

class Game:
    def hang(self): time.sleep(60)
    def pid(self): return os.getpid()
    def child(self): return subprocess.Popen(["sleep", "60"]).pid
    def die(self): os.kill(os.getpid(), 9)
    def echo(self, text): return text
"""


@pytest.fixture
def instances(tmp_path: Path):
    (tmp_path / "game.py").write_text(CODE)
    found = Instances(str(tmp_path / "game.py"), "Game", is_fresh=True)
    yield found
    found.close()


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before, or between opening and reading
        return False


def assert_ends(*pids: int) -> None:
    for _ in range(500):
        if not any(map(is_alive, pids)):
            return
        time.sleep(0.02)
    raise AssertionError([pid for pid in pids if is_alive(pid)])


def starter_of(instances: Instances) -> psutil.Process:
    """The process that forks those of the episodes."""
    [starter] = psutil.Process(instances._process.pid).children()
    return starter


async def number(instance, method: str, timeout_s: float = 30.0) -> int:
    return int((await instance.call(method, {}, timeout_s=timeout_s, most=100))["number"])


def test_200_episodes_leave_no_process_and_no_socket(instances: Instances) -> None:
    """Some hang, some die, some are cancelled."""

    async def episode(place: int) -> list[int]:
        async with instances.instance() as instance:
            pids = [await number(instance, "pid"), await number(instance, "child")]
            if place % 20 == 1:
                with pytest.raises(TimedOut):
                    await number(instance, "hang", 0.1)
            if place % 20 == 2:
                with pytest.raises(EnvironmentFault):
                    await number(instance, "die")
            return pids

    async def all_of_them() -> list[int]:
        slots = asyncio.Semaphore(20)

        async def one(place: int) -> list[int]:
            async with slots:
                return await episode(place)

        found = await asyncio.gather(*map(one, range(200)))
        return [pid for pids in found for pid in pids]

    before = len(list(Path("/proc/self/fd").iterdir()))
    pids = asyncio.run(all_of_them())
    assert len(set(pids)) == 400
    assert_ends(*pids)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_cancelled_episode_ends_its_process(instances: Instances) -> None:
    async def hangs(found: list[int]) -> None:
        async with instances.instance() as instance:
            found.append(await number(instance, "pid"))
            await number(instance, "hang", 60)

    async def cancelled() -> list[int]:
        found: list[int] = []
        task = asyncio.create_task(hangs(found))
        while not found:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        return found

    assert_ends(*asyncio.run(cancelled()))


def test_closing_ends_what_still_runs(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(CODE)
    instances = Instances(str(tmp_path / "game.py"), "Game")

    async def left() -> list[int]:
        manager = instances.instance()
        instance = await manager.__aenter__()
        instances.kept = manager  # type: ignore[attr-defined]
        return [await number(instance, "pid"), await number(instance, "child")]

    pids = asyncio.run(left())
    instances.close()
    assert_ends(*pids)


def test_without_the_process_that_starts_them_there_is_a_fault(instances: Instances) -> None:
    os.kill(instances._process.pid, signal.SIGKILL)
    instances._process.wait()

    async def one() -> None:
        async with instances.instance():
            raise AssertionError

    with pytest.raises(EnvironmentFault, match="has ended"):
        asyncio.run(one())


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """As after SIGKILL of a run: the socket closes."""
    (tmp_path / "game.py").write_text(CODE)
    instances = Instances(str(tmp_path / "game.py"), "Game")
    instances._channel.close()
    assert instances._process.wait(30) == 0


def test_the_start_of_an_instance_holds_no_other_episode(instances: Instances) -> None:
    """The process that starts them may be slow: others go on meanwhile."""

    async def main() -> None:
        starter = starter_of(instances)
        starter.suspend()
        manager = instances.instance()
        starting = asyncio.ensure_future(manager.__aenter__())
        await asyncio.sleep(0.1)
        assert not starting.done()
        starter.resume()
        assert (await starting).is_alive
        await manager.__aexit__(None, None, None)

    asyncio.run(main())


def test_an_abandoned_start_leaves_no_process(instances: Instances) -> None:
    starter = starter_of(instances)

    async def main() -> None:
        starter.suspend()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(instances.instance().__aenter__(), 0.1)
        starter.resume()
        async with instances.instance() as later:  # the earlier one was started before it
            assert later.is_alive

    asyncio.run(main())
    psutil.wait_procs(starter.children(), timeout=10)
    assert starter.children() == []


def test_what_an_episode_imports_late_is_imported_once(tmp_path: Path) -> None:
    """Parts of packages that the file has imported, and nothing else."""
    for name, text in {"late/__init__.py": "", "late/part.py": "", "other.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import late

class Game:
    def reset(self):
        known = sorted({{"late.part", "other"}} & set(sys.modules))
        import late.part, other
        return known
"""
    (tmp_path / "game.py").write_text(code)
    instances = Instances(str(tmp_path / "game.py"), "Game", is_fresh=True)

    async def main() -> list[str]:
        found = []
        for _ in range(2):
            async with instances.instance() as one:
                found.append((await one.call("reset", {}, timeout_s=60, most=100))["text"])
        return found

    try:
        assert asyncio.run(main()) == ["[]", '["late.part"]']
    finally:
        instances.close()
