"""A checkpoint that is written while training goes on: complete or absent, and no failure is lost."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.engine.checkpoint import CHECKPOINTS, TrainerState, begin, newest_intact
from rlctl.engine.state_files import HeldFiles
from rlctl.errors import RlctlError, RunFailure
from rlctl.run_spec.load import load_spec
from rlctl.train import background, saving
from rlctl.train.background import NOTES, BackgroundWriter, HeldCheckpoint
from rlctl.train.saving import Saver
from tests.unit.train.test_verified_together import Threads

Write = Callable[[Path], object]


def full_disk(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def held(
    root: Path, step: int, rank: int = 0, write: Write = Path.touch, keep: int | None = 1
) -> HeldCheckpoint:
    """A checkpoint of one file of each rank, of which rank 0 has begun the directory."""
    files = HeldFiles()
    files.put(root / f".partial-{step:06d}/engine/rank-{rank}", write)
    return HeldCheckpoint(root, rank, TrainerState(step, step, 4), files, keep, None)


class Run(SimpleNamespace):
    """One rank with a `Saver`, whose checkpoints have one file that `write` creates."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        super().__init__()
        background = "trainer.save_in_background=true"
        self.spec = load_spec([], [], [background, "trainer.max_ckpt_to_keep=1", *overrides]).spec
        self.run_dir, self.root = tmp_path, tmp_path / CHECKPOINTS
        self.ranks = SimpleNamespace(is_main=True, sum=list, exchange=list, world_size=1)
        self.stop, self.history, self.stopped_because = SimpleNamespace(signal_number=0), [], ""
        self.total_steps, self.actor, self.critic = 9, SimpleNamespace(holds_state=True), None
        self.said: list[str] = []
        self.tracker = SimpleNamespace(note=self.said.append)
        self.write: Write = lambda path: path.write_bytes(b"state")
        self.held: list[bool] = []
        monkeypatch.setattr(saving, "save_checkpoint", self.save)

    def save(self, run: Any, step: int, best: int | None, *, holds: bool) -> HeldCheckpoint | None:
        self.held.append(holds)
        begin(self.root, step, ["engine", NOTES])
        return held(self.root, step, write=self.write) if holds else None

    def visible(self) -> list[str]:
        return sorted(path.name for path in self.root.glob("step_*"))


def test_training_goes_on_and_the_checkpoint_appears_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch)
    may_end = threading.Event()

    def slow(path: Path) -> None:
        path.write_bytes(b"half")
        assert may_end.wait(60)
        path.write_bytes(b"whole")

    with Saver(run) as saver:  # type: ignore[arg-type]
        saver.save(1)
        saver._writer.finish(run.ranks)
        assert run.visible() == ["step_000001"]
        run.write = slow
        saver.save(2)
        assert saver.after(3, {}) == (False, False)
        assert run.visible() == ["step_000001"]  # not removed before the next is whole
        threading.Timer(0.1, may_end.set).start()
        saver.save(4)  # waits: one at a time
        assert run.visible() == ["step_000002"]
    assert run.visible() == ["step_000004"]  # the end waits, too
    checkpoint, notes = newest_intact(run.root)
    assert checkpoint is not None
    assert notes == []
    assert (checkpoint.path / "engine/rank-0").read_bytes() == b"whole"
    assert (run.root / "latest").resolve() == checkpoint.path
    assert not (checkpoint.path / NOTES).exists()


@pytest.mark.parametrize("noticed", ["after the next step", "at the next save", "at the end"])
def test_a_failure_ends_the_run_with_the_words_of_a_save_that_training_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: str
) -> None:
    run = Run(tmp_path, monkeypatch)
    saver = Saver(run)  # type: ignore[arg-type]
    saver.save(1)
    saver._writer.finish(run.ranks)
    run.write = full_disk
    saver.save(2)
    saver._writer._wrote.wait(60)
    words = "the checkpoint of step 2 could not be written: No space left on device"
    notice = {
        "after the next step": lambda: saver.after(3, {}),
        "at the next save": lambda: saver.save(3),
        "at the end": lambda: saver.__exit__(None),
    }
    with pytest.raises(RunFailure, match=words) as error:
        notice[noticed]()
    assert error.value.where == str(run.root)  # so that the launcher removes what is unfinished
    assert "earlier checkpoints are intact" in str(error.value)
    assert run.visible() == ["step_000001"]
    assert newest_intact(run.root)[0] is not None


def test_a_run_that_fails_still_finishes_the_checkpoint_that_was_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch)
    with Saver(run) as saver, contextlib.suppress(ZeroDivisionError):  # type: ignore[arg-type]
        saver.save(1)
        raise ZeroDivisionError
    assert run.visible() == ["step_000001"]


def test_training_waits_for_the_last_and_where_no_copy_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch)
    saver = Saver(run)  # type: ignore[arg-type]
    saver.after(9, {})
    saver.save(9)
    assert run.held == [False]
    monkeypatch.setattr(saving, "free_host_bytes", lambda: 1000.0)
    saver = Saver(run)  # type: ignore[arg-type]
    saver.save(1)
    saver.save(2)
    assert run.held == [False] * 3
    [said] = run.said  # once
    assert "training waits while checkpoints are written" in said
    assert "free memory" in said
    monkeypatch.undo()
    own = Run(tmp_path, monkeypatch)
    own.actor.holds_state = False
    Saver(own).save(1)  # type: ignore[arg-type]
    assert own.held == [False]
    assert "the engine's own way" in own.said[0]


def test_by_default_only_large_checkpoints_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, "trainer.save_in_background=null")
    monkeypatch.setattr(saving, "free_host_bytes", lambda: float(2**40))
    for size, holds in ((2**30 - 1, False), (2**30, True)):
        monkeypatch.setattr(saving, "checkpoint_bytes", lambda _, size=size: size)
        assert Saver(run)._may_hold() is holds  # type: ignore[arg-type]
    assert run.said == []
    never = Run(tmp_path, monkeypatch, "trainer.save_in_background=false")
    assert not Saver(never)._may_hold()  # type: ignore[arg-type]


# --- several ranks ---------------------------------------------------------------------------------------


def test_the_main_rank_publishes_when_all_have_written(tmp_path: Path) -> None:
    begin(tmp_path, 3, ["engine", NOTES])
    others_wrote, seen = threading.Barrier(3), []

    def late(path: Path) -> None:
        others_wrote.wait(60)
        seen.append(sorted(each.name for each in tmp_path.glob("step_*")))
        path.write_bytes(b"late")

    def work(ranks: Any) -> None:
        writer = BackgroundWriter()
        writer.start(held(tmp_path, 3, ranks.rank, late if ranks.rank else Path.touch), 4)
        writer.finish(ranks)

    assert Threads(4).run(work) == [None] * 4
    assert seen == [[], [], []]
    checkpoint, notes = newest_intact(tmp_path)
    assert checkpoint is not None
    assert notes == []
    assert len(list((checkpoint.path / "engine").iterdir())) == 4


@pytest.mark.parametrize("failing", [0, 2])
def test_all_ranks_fail_with_the_error_of_the_one_that_could_not_write(tmp_path: Path, failing: int) -> None:
    begin(tmp_path, 3, ["engine", NOTES])

    def work(ranks: Any) -> None:
        writer = BackgroundWriter()
        writer.start(held(tmp_path, 3, ranks.rank, full_disk if ranks.rank == failing else Path.touch), 4)
        writer.finish(ranks)

    failures = Threads(4).run(work)
    assert all(isinstance(failure, RlctlError) for failure in failures), failures
    assert {str(failure) for failure in failures} == {str(failures[failing])}
    assert "step 3 could not be written: No space left" in str(failures[0])
    assert newest_intact(tmp_path) == (None, [])


def test_a_rank_that_is_gone_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_LAST_NOTES_S", 0.2)
    begin(tmp_path, 3, ["engine", NOTES])
    writer = BackgroundWriter()
    writer.start(held(tmp_path, 3), 2)
    writer.abandon()
    assert newest_intact(tmp_path) == (None, [])
    assert (tmp_path / ".partial-000003").is_dir()  # what a resume sets aside
