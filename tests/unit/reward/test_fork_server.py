"""Grading processes are forks: with the imports of their server, and with nothing else that is not theirs."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlctl.errors import UsageError
from rlctl.reward.pool import GradingPool
from tests.processes import has_ended, wait_until_ended
from tests.unit.reward.samples import pairs

MINE = """
import os, stat, tempfile
from pathlib import Path

def told(response):
    words = [os.environ.get("TOLD", ""), os.getcwd(), tempfile.gettempdir(), str(os.getppid())]
    Path(response).write_text("\\n".join(words))
    return 1.0

def inherits(response):
    kinds = []
    for name in range(3, 256):
        try:
            kinds.append(stat.S_IFMT(os.fstat(name).st_mode))
        except OSError:
            pass
    return float(sum(kind in (stat.S_IFIFO, stat.S_IFSOCK) for kind in kinds))

def leaves(response):
    os._exit(3)
"""
#: Notes every start of an interpreter.
NOTE = "open({file!r}, 'a').write('started\\n')\n"


@pytest.fixture
def pool_of(tmp_path: Path) -> Iterator[Callable[..., GradingPool]]:
    (tmp_path / "mine.py").write_text(MINE)
    pools = []

    def make(grader: str, **options: object) -> GradingPool:
        name = grader if grader == "maths" else f"{tmp_path}/mine.py:{grader}"
        pools.append(GradingPool(name, **{"num_workers": 1, **options}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Number of interpreters that have started since."""
    (tmp_path / "site").mkdir()
    file = tmp_path / "starts"
    (tmp_path / "site" / "sitecustomize.py").write_text(NOTE.format(file=str(file)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return lambda: file.read_text().count("started")


def server_of(pool: GradingPool) -> psutil.Process:
    return psutil.Process(pool._workers[0]._process.pid).parent()


def test_all_processes_of_a_grader_share_one_start(
    pool_of: Callable[..., GradingPool], starts: Callable[[], int]
) -> None:
    """Those that replace processes which responses ended, and those of later pools."""
    for _ in range(2):
        pool = pool_of("leaves", num_workers=2)
        grades = pool.grade(pairs(("a", "1"), ("b", "1"), ("c", "1")))
        assert {grade.kind for grade in grades} == {"crash"}
        pool.close()
    assert starts() == 1


def test_each_process_has_the_environment_and_directory_of_its_start(
    pool_of: Callable[..., GradingPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    for word in ("first", "second"):
        directory = tmp_path / word
        directory.mkdir()
        monkeypatch.chdir(directory)
        monkeypatch.setenv("TOLD", word)
        monkeypatch.setenv("TMPDIR", str(directory))
        pool = pool_of("told")
        assert pool.grade(pairs((str(told), "1"))) == [1.0]
        assert told.read_text().split()[:3] == [word, str(directory), str(directory)]


def test_no_process_has_pipes_of_others(pool_of: Callable[..., GradingPool]) -> None:
    """A pipe that somebody else holds never ends. Its own are one for requests and one for replies."""
    pools = [pool_of("inherits") for _ in range(3)]
    for _ in range(2):
        assert [pool.grade(pairs(("a", "1"))) for pool in pools] == [[2.0]] * 3


def test_a_server_that_is_killed_is_replaced_and_its_processes_go_on(
    pool_of: Callable[..., GradingPool], tmp_path: Path
) -> None:
    earlier, later = pool_of("told"), pool_of("told")
    asked = pairs((str(tmp_path / "told"), "1"))
    assert earlier.grade(asked) == [1.0]
    server, process = server_of(earlier), earlier._workers[0]._process.pid
    server.kill()
    assert not wait_until_ended([server.pid], 10.0)
    assert later.grade(asked) == [1.0]
    assert server_of(later).pid != server.pid
    assert earlier.grade(asked) == [1.0]
    assert not has_ended(process)
    earlier.close()
    assert not wait_until_ended([process], 10.0)


def test_a_stopped_supervisor_is_ended(
    pool_of: Callable[..., GradingPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.reward.fork_server._END_S", 0.2)
    pool = pool_of("inherits")
    pool.check()
    process = pool._workers[0]._process.pid
    os.kill(process, signal.SIGSTOP)
    pool.close()
    assert not psutil.pid_exists(process)


def test_a_server_that_cannot_start_is_an_error_of_the_grader(
    pool_of: Callable[..., GradingPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UsageError, match="importing it failed: the process has ended"):
        pool_of("told").check()


CHILD = """
import os, sys, time
from rlctl.reward.pool import GradingPool
pool = GradingPool({name!r}, num_workers=1)
pool.check()
print(pool._workers[0]._process.pid, flush=True)
if os.fork() == 0:  # it has copies of all descriptors
    pool.close()
    os.write(1, b"closed\\n")
    time.sleep(600)
time.sleep(600)
"""


def test_servers_end_with_the_process_that_started_them_not_with_its_forks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    code = CHILD.format(name=f"{tmp_path}/mine.py:inherits")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as started:
        owner = psutil.Process(started.pid)
        supervisor = psutil.Process(int(started.stdout.readline()))
        server = supervisor.parent()
        assert started.stdout.readline() == "closed\n"
        assert not any(map(has_ended, (server.pid, supervisor.pid)))
        [fork] = [child for child in owner.children() if child.cmdline() == owner.cmdline()]
        try:
            started.kill()
            assert not wait_until_ended([server.pid], 10.0)
            assert not has_ended(fork.pid)
        finally:
            fork.kill()
    assert not wait_until_ended([supervisor.pid], 10.0)
