"""Files of a checkpoint that are held in memory are those that would have been written."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch

from rlctl.engine import state_files
from rlctl.engine.state_files import HeldFiles, Memory, StateFiles


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 50_000])
def test_memory_gives_back_what_was_written_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(state_files, "_BLOCK", 4096)
    content, memory = os.urandom(size), Memory()
    left = content
    for length in (1, 4095, 4096, 10_000, size):
        assert memory.write(memoryview(left[:length])) == len(left[:length])
        left = left[length:]
    assert memory.tell() == size
    memory.move_to(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == content


def test_numbers_of_several_bytes_are_written_as_bytes(tmp_path: Path) -> None:
    memory, values = Memory(), torch.arange(7, dtype=torch.float64)
    assert memory.write(values.numpy()) == 56
    memory.move_to(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == values.numpy().tobytes()


def test_a_held_state_does_not_follow_the_tensors_and_has_the_bytes_of_one_written_at_once(
    tmp_path: Path,
) -> None:
    whole = torch.randn(300, 7)
    state = {"weights": whole, "view": whole[3:5], "step": 3}
    now, later = StateFiles(), HeldFiles()
    for files, name in ((now, "now.pt"), (later, "later.pt")):
        with files.open(tmp_path / name) as file:
            torch.save(state, file)
    whole.zero_()
    assert [path.name for path in tmp_path.iterdir()] == ["now.pt"]
    later.write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["later.pt", "now.pt"]
    content = (tmp_path / "now.pt").read_bytes()
    assert (tmp_path / "later.pt").read_bytes() == content
    digest = hashlib.sha256(content).hexdigest()
    assert now.digests == {tmp_path / "now.pt": digest}
    assert later.digests == {tmp_path / "later.pt": digest}


def test_a_half_written_file_does_not_have_the_name_of_a_whole_one(tmp_path: Path) -> None:
    def half(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    files = HeldFiles()
    files.put(tmp_path / "model.safetensors", half)
    with pytest.raises(OSError, match="No space"):
        files.write()
    assert not (tmp_path / "model.safetensors").exists()
    assert files.digests == {}
