"""Files of killed processes, and of those that live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest

from rlctl import leftovers
from tests.processes import wait_until_ended

HOLDER = """
import os, sys, time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from rlctl import leftovers
from tests.hooks import keepers_are_fast
keepers_are_fast()
path, handle = leftovers.own_directory("rank", is_kept="kept" in sys.argv)
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")  # the tracker was killed too
if "kept" in sys.argv:  # with a child that ignores signals
    import subprocess
    child = subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; sleep 1000; :"], start_new_session=True)
    leftovers._tell(f"record {path}")
    leftovers.end_group_with_me(child.pid)
    while not (path / "shared-memory").exists():  # the keeper has looked
        time.sleep(0.02)
    print(path, segment.name, child.pid, flush=True)
else:
    (path / "shared-memory").write_text(segment.name)
    print(path, segment.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[str]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_what_a_killed_process_left_is_cleared_and_what_another_holds_is_not(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert holder.stdout
    directory, name = holder.stdout.readline().split()
    segment = leftovers.SHARED_MEMORY / name
    others = shared_memory.SharedMemory(create=True, size=4096)  # no process recorded it
    with leftovers.temporary_directory("code") as own:
        leftovers.clear()
        assert Path(directory).is_dir()  # its process is running
        assert segment.exists()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        attached = shared_memory.SharedMemory(name)  # another process still has it
        leftovers.clear()
        assert not Path(directory).exists()
        assert segment.exists()
        attached.close()
        Path(directory).mkdir()
        (Path(directory) / "shared-memory").write_text(f"{name} ../{own.name} missing")
        leftovers.clear()
        assert not segment.exists()
        assert own.is_dir()
    assert not own.exists()
    assert (leftovers.SHARED_MEMORY / others.name).exists()
    others.close()
    others.unlink()


def test_a_directory_that_another_user_planted_frees_nothing(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the name of one that a killed process of this user left."""
    assert holder.stdout
    directory, name = holder.stdout.readline().split()
    holder.kill()
    holder.wait()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/shared-memory").write_text(name)
    link = Path(f"{directory}x")
    link.symlink_to(tmp_path / "other")
    own, others = os.getuid(), os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: others)
    leftovers.clear()
    assert Path(directory).is_dir()
    monkeypatch.setattr(os, "getuid", lambda: own)
    (Path(directory) / "shared-memory").unlink()
    leftovers.clear()
    assert not Path(directory).exists()
    assert link.is_symlink()
    segment = leftovers.SHARED_MEMORY / name
    assert segment.exists()
    segment.unlink()


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGSTOP, signal.SIGKILL]])
def test_nothing_is_left_of_a_killed_process_within_15_s(
    tmp_path: Path, signals: list[signal.Signals]
) -> None:
    """No directory, no segment, and no server, which ignores signals; whatever the whole group is sent."""
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDER, "kept"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        assert owner.stdout
        directory, name, server = owner.stdout.readline().split()
        [keeper] = [p for p in psutil.Process(owner.pid).children() if "leftovers" in str(p.cmdline())]
        assert not keeper.environ()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            keeper.send_signal(number)
        assert Path(directory).is_dir()
        for number in signals:
            os.killpg(owner.pid, number)
    finally:
        owner.kill()
        owner.wait()
    assert wait_until_ended([int(server), keeper.pid], timeout=15) == []
    assert [*tmp_path.iterdir()] == []
    assert not (leftovers.SHARED_MEMORY / name).exists()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Unix sockets fit in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


def test_temporary_files_end_with_a_process_that_calls_exit(short_path: Path) -> None:
    code = """
import os, tempfile
from rlctl import leftovers
with leftovers.own_temporary_files():
    tempfile.mkdtemp()
    print(os.environ["TMPDIR"], flush=True)
    os._exit(0)
"""
    environment = os.environ | {"TMPDIR": str(short_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.startswith(str(short_path))
    deadline = time.monotonic() + 15
    while [*short_path.iterdir()] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [*short_path.iterdir()] == []
