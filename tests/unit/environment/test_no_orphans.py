"""What an environment's tools start, in whatever way, ends with its episode or with the trainer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlctl.environment.instances import Instances
from tests.processes import Job
from tests.unit.environment.test_instances import assert_ends, is_alive

#: Ways in which a tool starts a process that does not end with it.
WAYS = {
    "a child": "subprocess.Popen(SLEEP)",
    "a session": "subprocess.Popen(SLEEP, start_new_session=True)",
    "setsid": "subprocess.Popen(['setsid', *SLEEP])",
    "a daemon": "daemon()",
    "ignores hang-ups": "subprocess.Popen(['sh', '-c', 'nohup ' + ' '.join(SLEEP) + ' & exit'])",
    "ignores signals": "subprocess.Popen(['sh', '-c', 'trap \"\" TERM HUP INT; ' + ' '.join(SLEEP) + '; :'])",
    "is stopped": "os.kill(subprocess.Popen(SLEEP, start_new_session=True).pid, signal.SIGSTOP)",
    "a chain of sessions": "chain(6)",
}
CODE = """
import os, signal, subprocess, time

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp(SLEEP[0], SLEEP)
        os._exit(0)

def chain(length):
    if length and os.fork() == 0:
        os.setsid()
        chain(length - 1)
        os.execvp(SLEEP[0], SLEEP)

class Game:
    def start(self, way: str, mark: str):
        global SLEEP
        SLEEP = ["sleep", mark]
        eval(way)
    def hang(self): time.sleep(1000)
"""


@pytest.fixture
def mark() -> str:
    """A number of seconds by which the processes of a test are found."""
    return f"{1000 + int.from_bytes(os.urandom(3), 'big')}.5"


def sleeping(mark: str) -> list[int]:
    """The living processes with this mark."""
    found = [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or ())]
    return [pid for pid in found if is_alive(pid)]


async def appears(mark: str) -> None:
    while not sleeping(mark):
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A user's environment."""
    path = tmp_path_factory.mktemp("game") / "game.py"
    path.write_text(CODE)
    return str(path)


@pytest.fixture(scope="module")
def instances(file: str) -> Iterator[Instances]:
    shared = Instances(file, "Game")
    yield shared
    shared.close()


def starts(way: str, mark: str) -> dict[str, str]:
    """Arguments of the tool."""
    return {"way": WAYS[way], "mark": mark}


def assert_none(mark: str) -> None:
    for _ in range(500):
        if not (left := sleeping(mark)):
            return
        time.sleep(0.03)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(left)


@pytest.mark.parametrize("way", WAYS)
def test_it_ends_with_its_episode_and_not_with_another_one(instances: Instances, mark: str, way: str) -> None:
    async def main() -> None:
        async with instances.instance() as other:
            async with instances.instance() as one:
                await one.call("start", starts(way, mark), timeout_s=60, most=100)
                await appears(mark)
            while sleeping(mark):
                await asyncio.sleep(0.02)
            await other.call("start", starts(way, mark), timeout_s=60, most=100)
            await appears(mark)
            await asyncio.sleep(0.3)  # orphans of an episode that runs are left alone
            assert sleeping(mark)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert_none(mark)


def trainer(file: str, method: str, mark: str) -> int:
    """Holds an instance until it is killed."""
    instances = Instances(file, "Game")

    async def main() -> None:
        async with instances.instance() as one:
            await one.call("start", starts("a daemon", mark), timeout_s=60, most=100)
            await one.call(method, {}, timeout_s=None, most=100)

    asyncio.run(main())
    return 0


def processes_of(file: str) -> list[psutil.Process]:
    """The supervisor of a file's environment, and its descendants."""
    known = []
    for process in psutil.process_iter(["cmdline"]):
        if {file, "rlctl.environment.worker"} <= {*(process.info["cmdline"] or ())}:
            known.append(process)
    return known


VICTIMS: dict[str, Callable[[list[psutil.Process]], psutil.Process]] = {
    "main supervisor": lambda known: known[0],
    "starter": lambda known: known[0].children()[0],
    "supervisor of the episode": lambda known: known[0].children()[0].children()[0],
    "episode": lambda known: known[0].children()[0].children()[0].children()[0],
}


@pytest.fixture
def held(tmp_path: Path, mark: str) -> Iterator[Job]:
    """A trainer with an episode that hangs in a tool, and with a daemon that the episode has started."""
    file = str(tmp_path / "game.py")  # by which its processes are found
    Path(file).write_text(CODE)
    job = Job(trainer, file, "hang", mark, log=tmp_path / "log")
    job.wait_for(lambda: sleeping(mark))
    job.file = file  # type: ignore[attr-defined]
    yield job
    job.end()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_trainer_is_killed(held: Job, mark: str, is_stopped: bool) -> None:
    """Its environment runs, or the episode's process is stopped."""
    known = processes_of(held.file)  # type: ignore[attr-defined]
    pids = [process.pid for process in known]
    assert len(pids) == 4
    if is_stopped:
        os.kill(VICTIMS["episode"](known).pid, signal.SIGSTOP)
    held.signal(signal.SIGKILL)
    assert held.wait() == -signal.SIGKILL
    assert_ends(*pids)
    assert_none(mark)


@pytest.mark.parametrize("victim", VICTIMS)
def test_one_process_of_an_environment_is_killed(held: Job, mark: str, victim: str) -> None:
    """The trainer lives on; the call that hangs becomes a fault."""
    known = processes_of(held.file)  # type: ignore[attr-defined]
    VICTIMS[victim](known).kill()
    assert held.wait(60) == 99
    assert "the process of the environment ended in hang" in held.output
    assert_none(mark)
    assert_ends(*(process.pid for process in known))


def hangs_in_import(file: str) -> int:
    Instances(file, "Game")
    return 0


def test_the_trainer_is_killed_while_the_file_is_imported(tmp_path: Path, mark: str) -> None:
    file = tmp_path / "game.py"
    file.write_text(f"import subprocess\nsubprocess.run(['setsid', '-w', 'sleep', '{mark}'])")
    job = Job(hangs_in_import, str(file), log=tmp_path / "log")
    job.wait_for(lambda: sleeping(mark))
    known = processes_of(str(file))
    job.signal(signal.SIGKILL)
    job.wait()
    assert_ends(*(process.pid for process in known))
    assert_none(mark)


def test_a_tool_that_forks_without_end(tmp_path: Path, mark: str) -> None:
    """Each process starts two others and ends: none is there for long."""
    bomb = f"""
import os, sys, time
sys.argv.append("{mark}")
for _ in range(200):
    if os.fork() == 0:
        os.setsid()
        time.sleep(0.002)
    else:
        os._exit(0)
os.execvp("sleep", ["sleep", "{mark}"])
"""
    start = f"subprocess.Popen([sys.executable, '-c', {bomb!r}])"
    code = f"import subprocess, sys\nclass Game:\n    def start(self):\n        {start}\n"
    (tmp_path / "game.py").write_text(code)
    instances = Instances(str(tmp_path / "game.py"), "Game")

    async def main() -> None:
        async with instances.instance() as one:
            for _ in range(3):
                await one.call("start", {}, timeout_s=60, most=100)
            await asyncio.sleep(0.1)

    try:
        asyncio.run(main())
        time.sleep(1.0)
        assert_none(mark)
    finally:
        instances.close()
