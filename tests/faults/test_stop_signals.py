"""SIGTERM and SIGINT at any moment: the exit code of the signal, whatever was being imported or destroyed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import runs

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, sys, tempfile
from rlctl.cli import app
def run(arguments):
    with tempfile.TemporaryDirectory(dir={place!r}):
        {action}
    return 0
app.run, inner = (lambda arguments: wrapped(arguments)), app.run
def wrapped(arguments):
    try:
        return run(arguments)
    except SystemExit as stop:
        return stop.code
    except KeyboardInterrupt:
        return 130
app.main()
"""


def _run(tmp_path: Path, action: str) -> int:
    place = tmp_path / "place"
    place.mkdir()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-c", PROGRAM.format(place=str(place), action=action)]
    return subprocess.run(command, env=env, timeout=120, check=False).returncode


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_outside_an_import_temporary_files_are_removed(tmp_path: Path, number: int, code: int) -> None:
    assert _run(tmp_path, f"os.kill(os.getpid(), {int(number)})") == code
    assert not list((tmp_path / "place").iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_within_an_import_the_process_ends_at_once(tmp_path: Path, number: int, code: int) -> None:
    """An exception would reach the extension that imports the module, here one that swallows it."""
    (tmp_path / "inner.py").write_text(f"import os; os.kill(os.getpid(), {int(number)}); x = 1")
    (tmp_path / "outer.py").write_text("try:\n    import inner\nexcept BaseException:\n    pass\n")
    assert _run(tmp_path, "import outer") == code


def test_a_second_signal_ends_what_swallowed_the_first(tmp_path: Path) -> None:
    (tmp_path / "deaf.py").write_text(
        "import os, signal\n"
        "class Deaf:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    twice = "from deaf import Deaf; d = Deaf(); del d; os.kill(os.getpid(), signal.SIGTERM)"
    assert _run(tmp_path, twice) == 143


@pytest.fixture(scope="module")
def small_run(embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("signals") / "run"
    steps = ("-p", "rloo-seq-is", "trainer.total_training_steps=2")
    return runs.train(where, *steps, env={"RLCTL_CACHE": str(embedded_cache)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "RUN", "-o", "page.html"],
        ["diagnose", "RUN"],
        ["samples", "RUN"],
        ["train", "-p", "rloo-seq-is", "--dry-run"],
        ["export", "RUN", "--out", "exported"],
    ],
)
def test_random_moments(arguments: list[str], small_run: Path, tmp_path: Path) -> None:
    """From the start of the interpreter to the end; before `main` the signal itself ends the process."""
    command = [sys.executable, "-m", "rlctl", *(str(small_run) if a == "RUN" else a for a in arguments)]
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    start = time.monotonic()
    subprocess.run(command, **options, capture_output=True, check=False)
    whole = time.monotonic() - start
    chance = random.Random(0)
    for _ in range(2):
        shutil.rmtree(tmp_path / "exported", ignore_errors=True)  # an export refuses a directory with files
        with subprocess.Popen(
            command, **options, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            time.sleep(chance.random() * whole)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=120)
        assert process.returncode in (143, -signal.SIGTERM, 0), errors[-2000:]
        assert b"Segmentation" not in errors
