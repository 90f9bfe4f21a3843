"""Shared by every test: no hub, no W&B network, one thread per process, one embedded model."""

from __future__ import annotations

import gc
import os
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Two cores and many small tensors: threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Typer builds the whole command tree anew for every call, which takes longer than most commands.
typer.main.get_command = cache(typer.main.get_command)

#: What a test module mentions if it starts processes, engines or training.
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
    """What `-m "not processes …"` leaves out is not imported either: it imports DeepSpeed and more."""
    is_left_out = "not processes" in config.option.markexpr and collection_path.match("test_*.py")
    return True if is_left_out and _starts_processes(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `processes`, by module: `make test-fast` leaves these tests out, other runs begin with them.

    A long module at the end would leave all workers but one idle.
    """
    for item in items:
        if _starts_processes(item.path):
            item.add_marker("processes")
    items.sort(key=lambda item: not _starts_processes(item.path))
    gc.freeze()  # what is imported by now stays: no collection need look at it


#: Rows of the data that the embedded model trains on in tests: every start reads and renders all of them.
FEW_ROWS = 1024


@pytest.fixture(scope="session")
def whole_embedded_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`RLCTL_CACHE` of all workers, with the embedded model of seed 1 and all of its data: built once."""
    from rlctl.tiny.embedded import ensure_embedded

    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "rlctl-cache"
    ensure_embedded(1, shared)
    return shared


@pytest.fixture(scope="session")
def embedded_cache(whole_embedded_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`RLCTL_CACHE` of this worker, with the same model and the first of its data."""
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
    """Where `python`, `rlctl`, `torchrun` and `deepspeed` are that start at the price of a fork."""
    from tests.forked_python import commands

    with commands() as directory:
        yield directory


@pytest.fixture(scope="session")
def forked_vllm() -> Iterator[Path]:
    """The same, of a process that has imported vLLM."""
    from tests.forked_python import commands
    from tests.hooks import forked_ranks_with_vllm

    with commands(before=forked_ranks_with_vllm) as directory:
        yield directory


@pytest.fixture
def embedded(embedded_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of the embedded model find it there; returns the cache."""
    monkeypatch.setenv("RLCTL_CACHE", str(embedded_cache))
    return embedded_cache


@pytest.fixture
def whole_embedded(whole_embedded_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with all of its data: for runs that learn."""
    monkeypatch.setenv("RLCTL_CACHE", str(whole_embedded_cache))
    return whole_embedded_cache
