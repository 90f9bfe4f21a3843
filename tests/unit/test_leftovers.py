"""Files of killed processes, and of those that live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from rlctl import leftovers

HOLDER = """
import os, sys, time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from rlctl import leftovers
path, handle = leftovers.own_directory("rank")
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")  # the tracker was killed too
leftovers.note_segments(path)
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
