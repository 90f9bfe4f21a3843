"""What becomes of ranks that fail, and who can reach their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests import hooks
from tests.processes import Job


def fine() -> int:
    return 7 if os.environ["RANK"] == "0" else 3


def usage_error_on_one() -> int:
    from rlctl.errors import UsageError

    if os.environ["RANK"] == "1":
        raise UsageError("cannot do that", where="here", fix="do this")
    time.sleep(60)
    return 0


def killed() -> int:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return 0


def killed_and_lost() -> int:
    """The other rank reports that it lost the killed one, and is slow to end, as a training rank is."""
    from rlctl.errors import LostRank

    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise LostRank("another rank has ended or cannot be reached")


def killed_and_missed() -> int:
    """The other rank fails too, because its collective needs the killed rank."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ConnectionError("closed by peer")


def refused_and_missed() -> int:
    from rlctl.errors import UsageError

    if os.environ["RANK"] == "1":
        raise UsageError("cannot do that")
    raise ConnectionError("closed by peer")


def broken() -> int:
    raise ZeroDivisionError("ours")


def guarded() -> int:
    """Whether other users can use no store of the ranks: the launcher has no port, the file is private."""
    from rlctl.engine.launch import STORE
    from rlctl.engine.ranks import join_ranks

    join_ranks().barrier()
    own, launchers = (psutil.Process(pid).net_connections("inet") for pid in (os.getpid(), os.getppid()))
    assert launchers == []
    assert {each.laddr.ip for each in own} == {"127.0.0.1"}  # gloo's
    return Path(os.environ[STORE]).parent.stat().st_mode & 0o077


def launched(target) -> int:
    """The exit code as `rlctl` would have it; what was raised is printed."""
    from rlctl.engine.launch import run_ranks
    from rlctl.errors import RlctlError

    try:
        return run_ranks(2, target)
    except RlctlError as error:
        print(type(error).__name__, error)
        return error.exit_code


STARTS_A_RANK = """
import os, subprocess, sys
rank = "from rlctl.engine.launch import _rank_main; import sys; _rank_main(int(sys.argv[1]), print, 'begins')"
late = "import os, time\\nwhile os.getppid() == int(__import__('sys').argv[1]): time.sleep(0.01)\\n"
subprocess.Popen([sys.executable, "-c", late + rank, str(os.getpid())])
"""


def test_a_rank_that_is_still_starting_when_its_launcher_is_killed_does_not_begin() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS_A_RANK], capture_output=True, text=True, timeout=120, check=True
    )  # returns when the rank, which inherits the pipes, has ended as well
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        (fine, 7, ""),
        (guarded, 0, ""),
        (usage_error_on_one, 2, "UsageError here: cannot do that (rank 1) (do this)"),
        (killed, 1, "RunFailure rank 1 ended without an error message"),
        (killed_and_missed, 1, "rank 1 ended without an error message"),
        (killed_and_lost, 1, "rank 1 ended without an error message"),
        (refused_and_missed, 2, "cannot do that"),
        (broken, 1, "RunFailure ZeroDivisionError: ours (rank"),
    ],
)
def test_ranks(tmp_path: Path, forked_commands: Path, target, code: int, said: str) -> None:
    before = partial(hooks.python_is, str(forked_commands / "python"))
    job = Job(launched, target, log=tmp_path / "log", before=before)
    assert job.wait() == code, job.output[-4000:]
    assert said in job.output
    assert job.orphans() == []
