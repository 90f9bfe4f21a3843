"""Each check of the machine: what it reports on a good one, and where something is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlctl.doctor import checks
from rlctl.doctor.checks import machine_checks
from rlctl.run_spec import machine


def check(name: str):
    return next(found for found in machine_checks() if found.name == name)


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("RLCTL_CACHE", str(file / "below"))
    found = check("disk for rlctl's cache")
    assert (found.status, found.found) == ("broken", f"{file} is not writable")
    assert "RLCTL_CACHE" in str(found.fix)
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "not" / "yet"))
    assert "disk for rlctl's cache" not in {found.name for found in machine_checks()}


def test_models_may_be_in_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(file / "hub"))
    found = check("disk for models' cache")
    assert (found.status, found.found) == ("note", f"{file} is not writable")
    assert "HF_HUB_CACHE" in str(found.fix)


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("2147483648\n")
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", (limit,))
    machine.this_machine.cache_clear()
    found = check("CPU").found
    machine.this_machine.cache_clear()
    assert "cores, 2 GiB, the limit of this container, " in found


def test_a_place_below_a_closed_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Path.exists` raises there."""
    stat = os.stat

    def refuse(path: object, **options: object) -> os.stat_result:
        if str(path).startswith("/closed/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)  # type: ignore[arg-type]

    monkeypatch.setenv("RLCTL_CACHE", "/closed/cache")
    monkeypatch.setattr(os, "stat", refuse)
    assert machine_checks()


def test_little_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DISK_USUAL", 1)
    assert check("disks").status == "ok"
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
