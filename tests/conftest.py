"""Configuration of all tests: no hub, W&B offline, default signals, one thread, one embedded model."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

from tests.selection import is_thorough, place_of

gc.disable()  # until all tests are collected: nothing of them is garbage
TESTS = Path(__file__).parent
#: Seconds of tests from which on the slowest files are printed.
LONG_RUN_S = 60.0

if threading.current_thread() is threading.main_thread():
    # A shell that starts a command in the background lets it, and all that it starts, ignore these: a test
    # that interrupts itself, or a run, would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# With two cores and many small tensors, threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not shutil.which("nvidia-smi"):
    # vLLM compiles a function that counts ranks, and fills its cache: seconds per process. On a GPU it also
    # compiles the model, as in users' runs.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# Typer rebuilds the whole command tree for every call, which takes longer than most commands.
typer.main.get_command = cache(typer.main.get_command)

#: Names in the source of test modules that start processes, engines or training.
_STARTS = re.compile(
    r"\b(on_ranks|subprocess|Job|GradingPool|embedded|DeepSpeedEngine|HFRollout|VLLMRollout|playwright)\b"
    r"|\b(RayEngine|ray_hosts|attempt|forked_\w+)\b"
    r"|\b(opened|loaded_from_elsewhere)\b"  # a browser
    r"|rlctl\.evaluate\.evaluation import"  # grading processes
    r"|from tests import .*\b(runs|processes|clusters)\b|from tests\.(runs|processes|clusters)"
)


@cache
def _starts_processes(path: Path) -> bool:
    return bool(_STARTS.search(path.read_text(encoding="utf-8")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import modules that `-m "not processes …"` excludes, because they import slow libraries."""
    is_left_out = "not processes" in config.option.markexpr and collection_path.match("test_*.py")
    return True if is_left_out and _starts_processes(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests as `thorough` (`tests/selection.py`), and test modules as `processes`.

    `make test-fast` excludes the latter, other runs start with them, the longest first: a slow module at the
    end would leave all workers except one idle.
    """
    for item in items:
        if _starts_processes(item.path):
            item.add_marker("processes")
        if is_thorough(item.path.relative_to(TESTS).as_posix(), getattr(item, "originalname", item.name)):
            item.add_marker("thorough")
    files = {item.path: item.path.relative_to(TESTS).as_posix() for item in items}
    items.sort(key=lambda item: (place_of(files[item.path]), not _starts_processes(item.path)))
    gc.freeze()  # imported objects stay alive: exclude them from garbage collection
    gc.enable()


#: Number of training rows of the embedded model in tests; small, because every start renders all of them.
FEW_ROWS = 1024


@pytest.fixture(scope="session", autouse=True)
def _state_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The key that signs runs is not the user's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_grading_process() -> Iterator[None]:
    """A pool of graders starts one process if no number is given: each imports sympy, for seconds.

    The forks of `tests.preload` do so too. Tests of pools name the number of processes.
    """
    import rlctl.reward.code  # runs as many programs at once as before

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rlctl.reward.pool, "share_of_cores", lambda: 1)
        yield


@pytest.fixture(scope="session")
def whole_embedded_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`RLCTL_CACHE` shared by all workers, with the embedded model of seed 1 and all its data; built once.

    The file `built` has the last message of its build.
    """
    from rlctl.tiny.embedded import ensure_embedded

    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "rlctl-cache"
    shared.mkdir(exist_ok=True)
    ensure_embedded(1, shared, (shared / "built").write_text)
    return shared


@pytest.fixture(scope="session")
def embedded_cache(whole_embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`RLCTL_CACHE` of this worker, with the same model and its first `FEW_ROWS` training rows."""
    from rlctl.tiny import embedded

    whole = embedded.ensure_embedded(1, whole_embedded_cache)
    cache, split = tmp_path_factory.mktemp("rlctl-cache"), embedded.split
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(embedded, "_build_model", lambda where, *_: shutil.copytree(whole.model_dir, where))
        patched.setattr(embedded, "split", lambda num_val: (split(num_val)[0][:FEW_ROWS], split(num_val)[1]))
        embedded.ensure_embedded(1, cache)
    return cache


@pytest.fixture(scope="session")
def forked_commands() -> Iterator[Path]:
    """Directory with `python`, `rlctl` and `torchrun` that start as forks, without imports."""
    from tests.forked_python import commands

    with commands() as directory:
        yield directory


@pytest.fixture(scope="session")
def forked_vllm() -> Iterator[Path]:
    """Like `forked_commands`, with forks of a process that has imported vLLM."""
    from tests.forked_python import commands
    from tests.hooks import forked_ranks_with_vllm

    with commands(before=forked_ranks_with_vllm) as directory:
        yield directory


@pytest.fixture
def embedded(embedded_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets `RLCTL_CACHE` to `embedded_cache`; returns the cache."""
    monkeypatch.setenv("RLCTL_CACHE", str(embedded_cache))
    return embedded_cache


@pytest.fixture
def whole_embedded(whole_embedded_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets `RLCTL_CACHE` to the cache with all data, for runs that must learn; returns the cache."""
    monkeypatch.setenv("RLCTL_CACHE", str(whole_embedded_cache))
    return whole_embedded_cache


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the ten slowest files of a long run: where to look first when the tests get slow."""
    seconds: dict[str, float] = defaultdict(float)
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.split("::")[0]] += report.duration
    if sum(seconds.values()) > LONG_RUN_S:
        terminalreporter.write_line("slowest files:")
        for file, total in sorted(seconds.items(), key=lambda item: -item[1])[:10]:
            terminalreporter.write_line(f"{total:7.0f} s  {file}")
