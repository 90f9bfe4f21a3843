"""Each check of the machine: what it reports on a good one, and where something is wrong."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rlctl.doctor import checks
from rlctl.doctor.checks import machine_checks
from rlctl.spec import machine


def check(name: str):
    return next(found for found in machine_checks() if found.name == name)


def test_the_loopback_network_is_really_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("network").status == "ok"

    def refuse(*_: object, **__: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_connection", refuse)
    found = check("network")
    assert found.status == "broken"
    assert "Permission denied" in found.found


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("RLCTL_CACHE", str(file / "below"))
    found = check("disk for rlctl's cache")
    assert (found.status, found.found) == ("broken", f"{file} is not writable")
    assert "RLCTL_CACHE" in str(found.fix)
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "not" / "yet"))
    assert check("disk for rlctl's cache").status == "ok"


def test_models_may_be_in_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(file / "hub"))
    found = check("disk for models' cache")
    assert (found.status, found.found) == ("note", f"{file} is not writable")
    assert "HF_HUB_CACHE" in str(found.fix)


def test_wandb_knows_only_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Current versions of W&B ignore WANDB_DISABLED."""
    monkeypatch.setenv("WANDB_DISABLED", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check("W&B").found.startswith("offline")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert check("W&B").found.startswith("disabled")


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("2147483648\n")
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", (limit,))
    machine.this_machine.cache_clear()
    found = check("CPU").found
    machine.this_machine.cache_clear()
    assert found.endswith("cores, 2 GiB, the limit of this container")


def test_a_place_below_a_closed_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Path.exists` raises there."""
    stat = os.stat

    def refuse(path: object, **options: object) -> os.stat_result:
        if str(path).startswith("/closed/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)  # type: ignore[arg-type]

    monkeypatch.setenv("RLCTL_CACHE", "/closed/cache")
    monkeypatch.setattr(os, "stat", refuse)
    assert check("disk for rlctl's cache").status in {"ok", "note", "broken"}


def test_little_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DISK_USUAL", 1 << 60)
    monkeypatch.setattr(checks, "SHARED_MEMORY_USUAL", 1 << 60)
    assert check("disk for runs").status == "note"
    assert "--shm-size" in str(check("shared memory").fix)
    monkeypatch.setattr(checks, "DISK_NEEDED", 1 << 60)
    assert check("disk for runs").status == "broken"


def test_a_missing_compiler_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = check("C++ compiler")
    assert found.status == "note"
    assert found.found.startswith("no-such-compiler")
    assert "vLLM" in str(found.fix)  # whose kernels Triton compiles


@pytest.mark.parametrize(
    ("mode", "key", "status", "words"),
    [
        ("offline", None, "ok", "offline"),
        ("disabled", None, "note", "disabled"),
        ("online", None, "note", "not logged in"),
        ("online", "k", "ok", "online, logged in"),
    ],
)
def test_wandb_modes(mode, key, status, words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    found = check("W&B")
    assert found.status == status
    assert words in found.found
