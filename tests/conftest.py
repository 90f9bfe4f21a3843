"""Shared by every test: no hub, no W&B network, one thread per process, one embedded model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# Two cores and many small tensors: threads would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
