"""Directories for engines: complete or absent; errors state what to do."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from rlctl.errors import RunFailure
from rlctl.rollout.weights import VersionedDir


@pytest.mark.parametrize(
    "trouble",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")],
)
def test_a_full_disk_is_said_and_leaves_the_version_before(tmp_path: Path, trouble: Exception) -> None:
    versions = VersionedDir(tmp_path)

    def whole(directory: Path) -> None:
        (directory / "weights").write_text("whole")

    def half(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise trouble

    before = versions.publish("one", whole)
    with pytest.raises(RunFailure, match="No space left on device") as caught:
        versions.publish("one", half)
    assert "rollout.server.weights_dir" in str(caught.value.fix)
    assert versions.latest() == before
    assert (before / "weights").read_text() == "whole"
    versions.close()
    assert list(tmp_path.iterdir()) == []
