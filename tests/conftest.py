"""Shared by every test: no hub, no W&B network, one thread per process, one embedded model."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Two cores and many small tensors: threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")


#: What a test module mentions if it starts processes, engines or training.
_STARTS = re.compile(
    r"\b(on_ranks|subprocess|Job|GradingPool|embedded|DeepSpeedEngine|HFRollout|VLLMRollout|playwright|RayEngine)\b"
    r"|from tests import .*\b(runs|processes|clusters)\b|from tests\.(runs|processes|clusters)"
)


@cache
def _starts_processes(path: Path) -> bool:
    return bool(_STARTS.search(path.read_text(encoding="utf-8")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark `processes`, by module: `make test-fast` leaves these tests out."""
    for item in items:
        if _starts_processes(item.path):
            item.add_marker("processes")


@pytest.fixture(scope="session")
def embedded_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`RLCTL_CACHE` of the session, with the embedded model of seed 1 built once."""
    from rlctl.tiny.embedded import ensure_embedded

    cache = tmp_path_factory.mktemp("rlctl-cache")
    ensure_embedded(1, cache)
    return cache


@pytest.fixture
def embedded(embedded_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of the embedded model find it there; returns the cache."""
    monkeypatch.setenv("RLCTL_CACHE", str(embedded_cache))
    return embedded_cache
