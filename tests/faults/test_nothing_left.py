"""Within 15 s of a kill there is no process, no port and no file in /tmp and /dev/shm, whoever was killed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import hooks, runs
from tests.processes import Job, wait_until_ended

pytestmark = pytest.mark.usefixtures("embedded")
LIMIT_S = 15.0
ONE, TWO = ("trainer.n_gpus_per_node=1",), ("trainer.n_gpus_per_node=2",)
#: Who is killed → settings, and signals to a process (0: the trainer or launcher, 1: a rank that it started,
#: -1: every process of the run).
KILLS: dict[str, tuple[tuple[str, ...], list[tuple[int, signal.Signals]]]] = {
    "trainer": (ONE, [(0, signal.SIGKILL)]),
    "trainer that is stopped": (ONE, [(0, signal.SIGSTOP), (0, signal.SIGKILL)]),
    "trainer by SIGABRT": (ONE, [(0, signal.SIGABRT)]),
    "trainer by SIGBUS": (ONE, [(0, signal.SIGBUS)]),
    "trainer by SIGQUIT": (ONE, [(0, signal.SIGQUIT)]),
    "trainer by SIGHUP": (ONE, [(0, signal.SIGHUP)]),
    "launcher of two ranks": (TWO, [(0, signal.SIGKILL)]),
    "one of two ranks": (TWO, [(1, signal.SIGKILL)]),
    "launcher, and its ranks are stopped": (TWO, [(1, signal.SIGSTOP), (0, signal.SIGKILL)]),
    "launcher and ranks at once": (TWO, [(-1, signal.SIGKILL)]),
}


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory for temporary files, with a path that sockets fit in."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="left-") as path:
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path)


def prepare() -> None:
    hooks.keepers_are_fast()
    hooks.pauses()
    tempfile.mkdtemp(prefix="before-")


def left_in_shared_memory(pids: list[int]) -> list[str]:
    shared = [path.name for path in Path("/dev/shm").glob("rlctl-*")]
    return [name for name in shared if {*name.split("-")} & {*map(str, pids)}]


def listening(pids: set[int | None]) -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("inet") if c.pid in pids and c.status == "LISTEN"}


def assert_nothing_is_left(job: Job, pids: list[int], temporary: Path, ports: set[int]) -> None:
    """Counts from now; what was there before the run is still there."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        names = [path.name for path in temporary.iterdir() if not path.name.startswith("before-")]
        if not (names or job.family() or left_in_shared_memory(pids)):
            break
        time.sleep(0.05)
    assert wait_until_ended(pids, timeout=max(0.0, deadline - time.monotonic())) == []
    assert names == []
    assert left_in_shared_memory(pids) == []
    assert not ports & listening({None, *pids})
    assert [path.name.partition("-")[0] for path in temporary.iterdir()] == ["before"]


@pytest.mark.parametrize("who", KILLS)
def test_nothing_is_left_of_a_run(tmp_path: Path, temporary: Path, who: str) -> None:
    settings, signals = KILLS[who]
    run = tmp_path / "run"
    long = ("-p", "rloo-seq-is", "trainer.total_training_steps=10000", "trainer.logger=[]")
    job = runs.start_train(run, *long, *settings, before=prepare)
    try:
        job.wait_for(lambda: len(runs.metrics(run)) >= 1)
        pids = [process.pid for process in job.family()]
        ports = listening({*pids})
        [own] = [path for path in temporary.iterdir() if path.name.startswith("rlctl-tmp-")]
        (own / "pymp-abc").mkdir()  # as of a library
        ranks = [pid for pid in pids if pid != job.pid]
        for index, number in signals:
            for pid in {0: [job.pid], 1: ranks[:1], -1: pids}[index]:
                os.kill(pid, number)
        assert_nothing_is_left(job, pids, temporary, ports)
        job.wait(30)
    finally:
        job.end()
