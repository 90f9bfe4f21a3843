"""A checkpoint exists whole or not at all."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest
import torch

from rlctl.engine import checkpoint
from rlctl.engine.checkpoint import (
    TrainerState,
    begin,
    checkpoint_of_run,
    newest_intact,
    point_to,
    publish,
    remove_unwritten,
    verify,
    writing,
)
from rlctl.errors import RunFailure, UsageError


def write(root: Path, step: int, keep: int | None = None) -> checkpoint.Checkpoint:
    partial = begin(root, step)
    (partial / "engine/state.pt").write_bytes(os.urandom(1000))
    (partial / "model/deep").mkdir()
    (partial / "model/deep/weights").write_bytes(b"w" * step)
    with writing(root, step):
        return publish(root, partial, TrainerState(step, 2 * step, 1), keep=keep)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_newest_is_found_with_its_state(tmp_path: Path) -> None:
    for step in (9, 10, 200):  # by number, not by name
        write(tmp_path, step)
    found, notes = newest_intact(tmp_path, set_aside=True)
    assert found is not None
    assert found.state == TrainerState(200, 400, 1)
    assert (found.model_dir / "deep/weights").read_bytes() == b"w" * 200
    assert notes == []


def test_nothing_there(tmp_path: Path) -> None:
    assert newest_intact(tmp_path / "missing", set_aside=True) == (None, [])
    assert newest_intact(tmp_path, set_aside=True) == (None, [])


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 3, 4]), (3, [2, 3, 4]), (1, [4])])
def test_oldest_go(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step, keep)
    assert names(tmp_path) == [f"step_{step:06d}" for step in left]


def test_steps_beyond_six_digits_stay_in_order(tmp_path: Path) -> None:
    write(tmp_path, 999_999)
    write(tmp_path, 1_000_000)
    found, _ = newest_intact(tmp_path, set_aside=True)
    assert found is not None
    assert found.state.step == 1_000_000


#: Of a manifest that stays readable: text, and what it becomes.
_EDITS = {
    "step": ('"step": 2', '"step": 6'),
    "version": ('"policy_version": 4', '"policy_version": 5'),
    "cut": ("}", ""),
    "hash": ('"engine/state.pt": "', '"engine/state.pt": "0'),
}


@pytest.mark.parametrize("damage", ["flip", "truncate", "grow", "remove", "manifest", "no manifest", *_EDITS])
def test_damaged_is_set_aside(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 1)
    victim = write(tmp_path, 2).path
    state = victim / "engine/state.pt"
    content = bytearray(state.read_bytes())
    if damage == "flip":
        content[500] ^= 1
        state.write_bytes(content)
    elif damage == "truncate":
        state.write_bytes(content[:-1])
    elif damage == "grow":
        state.write_bytes(content + b"!")
    elif damage == "remove":
        state.unlink()
    elif damage in _EDITS:
        manifest = victim / "manifest.json"
        edited = manifest.read_text().replace(*_EDITS[damage])
        assert edited != manifest.read_text()
        manifest.write_text(edited)
    elif damage == "manifest":
        (victim / "manifest.json").write_text('{"state": {"step": 2}, "sha256": {}}')
    else:
        (victim / "manifest.json").unlink()
    problem, none = verify(victim)
    assert problem
    assert none is None
    found, notes = newest_intact(tmp_path, set_aside=True)
    assert found is not None
    assert found.state.step == 1
    assert len(notes) == 1
    assert "step_000002" in notes[0]
    assert names(tmp_path) == ["damaged-step_000002", "step_000001"]
    assert newest_intact(tmp_path, set_aside=True) == (found, [])  # said once


def test_half_written_is_set_aside_and_never_found(tmp_path: Path) -> None:
    write(tmp_path, 1)
    partial = begin(tmp_path, 2)
    (partial / "engine/state.pt").write_bytes(b"half")
    found, notes = newest_intact(tmp_path, set_aside=True)
    assert found is not None
    assert found.state.step == 1
    assert "while it was being written" in notes[0]


def test_written_again_over_what_was_set_aside(tmp_path: Path) -> None:
    for _ in range(2):
        state = write(tmp_path, 1).path / "engine/state.pt"
        state.write_bytes(b"")
        assert newest_intact(tmp_path, set_aside=True)[0] is None
    write(tmp_path, 1)
    assert newest_intact(tmp_path, set_aside=True)[0] is not None


@pytest.mark.parametrize("at", ["hash_and_sync", "sync"])
def test_full_disk_leaves_the_others(tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, keep=1)

    def full(path: Path) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(checkpoint, at, full)
    with pytest.raises(RunFailure, match="No space left") as caught:
        write(tmp_path, 2, keep=1)
    assert "intact" in str(caught.value.fix)
    remove_unwritten(tmp_path, caught.value)
    assert names(tmp_path) == ["step_000001"]
    assert newest_intact(tmp_path, set_aside=True)[0] is not None


def test_other_libraries_errors_are_the_same_error(tmp_path: Path) -> None:
    partial = begin(tmp_path, 3)
    with pytest.raises(RunFailure, match="unexpected pos") as caught, checkpoint.writing(tmp_path, 3):
        raise RuntimeError("unexpected pos 3 vs 4\nat torch")
    remove_unwritten(tmp_path, RunFailure("rank 1 ended without an error message"))
    assert partial.exists()  # it is kept through a kill
    remove_unwritten(tmp_path, caught.value)
    assert not partial.exists()


def test_the_reason_is_that_of_the_write_not_torchs_next_error(tmp_path: Path) -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RunFailure, match=os.strerror(errno.ENOSPC)), writing(tmp_path, 1):
        torch.save({"weight": torch.zeros(9)}, Full())


def test_a_manifest_without_files_is_no_checkpoint(tmp_path: Path) -> None:
    victim = write(tmp_path, 2).path
    manifest = json.loads((victim / "manifest.json").read_text())
    del manifest["manifest_sha256"]
    manifest["state"]["zero_stage"] = 0
    (victim / "manifest.json").write_text(json.dumps(manifest))
    assert verify(victim)[0] == ""  # as older versions wrote it
    (victim / "manifest.json").write_text(json.dumps(manifest | {"sha256": {}}))
    assert verify(victim) == ("its manifest lists no file", None)


def test_a_renamed_checkpoint_is_not_another_step(tmp_path: Path) -> None:
    write(tmp_path, 2).path.rename(tmp_path / "step_000006")
    assert verify(tmp_path / "step_000006") == ("its manifest contains step 2", None)


def test_the_best_stays_and_links_follow(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        partial = begin(tmp_path, step)
        (partial / "model/weights").write_bytes(b"w")
        publish(tmp_path, partial, TrainerState(step, step, 1), keep=1, best=2)
        point_to(tmp_path, "latest", step)
        point_to(tmp_path, "best", 2)
    assert names(tmp_path) == ["best", "latest", "step_000002", "step_000004"]
    assert (tmp_path / "latest").resolve().name == "step_000004"
    assert str((tmp_path / "best").readlink()) == "step_000002"  # relative: the run may be moved
    point_to(tmp_path, "best", 3)  # it was never saved
    assert not (tmp_path / "best").is_symlink()
    found, _ = newest_intact(tmp_path, set_aside=True)
    assert found is not None
    assert found.state.step == 4


def test_files_are_readable_as_the_umask_says_and_no_folder_is_empty(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        partial = begin(tmp_path, 1)
        (partial / "model/weights").write_bytes(b"w")
        (partial / "model/weights").chmod(0o600)  # as safetensors does
        (partial / "engine/state").write_bytes(b"s")
        path = publish(tmp_path, partial, TrainerState(1, 1, 1), keep=None).path
    finally:
        os.umask(before)
    modes = {oct(file.stat().st_mode & 0o777) for file in path.rglob("*") if file.is_file()}
    assert modes == {"0o640"}
    assert all(any(folder.iterdir()) for folder in path.rglob("*") if folder.is_dir())


def test_a_damaged_one_is_named_with_the_one_used_instead(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step_000003/model/deep/weights").write_bytes(b"other")
    (tmp_path / "step_000002/model/deep/weights").unlink()
    for found, notes in (newest_intact(tmp_path), newest_intact(tmp_path, set_aside=True)):
        assert found is not None
        assert found.state.step == 1
        assert "step_000003" in notes[0]
        assert "checksum" in notes[0]
        assert "model/deep/weights is missing" in notes[1]
        assert all(note.endswith("step_000001 is used instead") for note in notes)


def test_a_run_without_checkpoint_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no complete checkpoint") as missing:
        checkpoint_of_run(tmp_path)
    assert "resume the run" in str(missing.value.fix)
    write(tmp_path / "checkpoints", 3)
    assert checkpoint_of_run(tmp_path)[0].state.step == 3
    with pytest.raises(UsageError, match="no complete checkpoint of step 4") as other:
        checkpoint_of_run(tmp_path, 4)
    assert other.value.fix == "checkpoints here: step_000003"
    (tmp_path / "checkpoints/step_000003/model/deep/weights").unlink()
    with pytest.raises(UsageError, match=r"no complete checkpoint \(step_000003 is damaged"):
        checkpoint_of_run(tmp_path)


@pytest.mark.parametrize("name", ["step_²", "step_x", "step_", "step_①"])
def test_directories_that_are_no_checkpoints_are_ignored(tmp_path: Path, name: str) -> None:
    write(tmp_path, 1)
    (tmp_path / name).mkdir()
    newest, _ = newest_intact(tmp_path, set_aside=True)
    assert newest is not None
    assert newest.state.step == 1
