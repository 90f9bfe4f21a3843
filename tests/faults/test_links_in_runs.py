"""Links in a run directory that lead out of it: nothing elsewhere is deleted, overwritten or added."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rlctl.engine.checkpoint import (
    TrainerState,
    begin,
    checkpoint_of_run,
    newest_intact,
    partial_path,
    point_to,
    publish,
    remove_unwritten,
)
from rlctl.errors import RlctlError, RunFailure, UsageError
from rlctl.evaluate.evaluate_report import Evaluation, write_evaluation
from rlctl.rollout.server_process import RayHost
from rlctl.run_files import DIRECTORIES, create_directory, remove, rename
from rlctl.track.dropped import DroppedEpisode, DroppedLedger
from rlctl.track.heartbeats import Beat, NodeFile
from rlctl.track.jsonl import JsonlSink, truncate_after
from rlctl.track.rollouts import RolloutWriter
from rlctl.track.run_dir import open_run_dir
from rlctl.track.sink import SinkInputs
from rlctl.train.start import _remove_unused
from tests.unit.track.test_rollouts import add, batch

BEAT = Beat(number=1, phases=1, place="p", idle_s=0.0, host="h", pid=1)


def contents(directory: Path) -> dict[str, bytes]:
    """Name → bytes of everything in a directory."""
    return {
        str(path.relative_to(directory)): b"a directory" if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    (path / "spec.yaml").write_text("{}")
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A directory of the user; the test fails if anything in it changes."""
    path = tmp_path / "victim"
    fill(path)
    before = contents(path)
    yield path
    assert contents(path) == before


def fill(path: Path) -> None:
    """Files with every name at which a run deletes or overwrites something."""
    for step in (1, 2, 3):
        saved(path, step)
    (path / ".partial-000004/model").mkdir(parents=True)
    (path / ".partial-000004/model/weights").write_text("theirs")
    (path / "rollouts-000009-000012.parquet").write_text("theirs")
    (path / ".rollouts-000001-000002.parquet.1.tmp").write_text("theirs")
    (path / "node-00000").write_text("theirs" * 1000)
    (path / "engine-0.log").write_text("theirs")
    (path / "step_000002/results.json").write_text("theirs")
    (path / "metrics.jsonl").write_text('{"step": 9}\nsecret\n')


def saved(root: Path, step: int, keep: int | None = None) -> None:
    partial = begin(root, step)
    (partial / "model/weights").write_text("w")
    publish(root, partial, TrainerState(step, step, 1), keep=keep)


def discard(run_dir: Path) -> None:
    RolloutWriter(run_dir, -1).discard_after(1)


def write_rollouts(run_dir: Path) -> None:
    writer = RolloutWriter(run_dir, -1)
    add(writer, 1, batch([0, 0]))
    writer.flush()


def beat(run_dir: Path) -> None:
    NodeFile(run_dir, 0, 1).write(0, BEAT)


def tensorboard(run_dir: Path) -> None:
    from rlctl.track.tensorboard import TensorboardSink

    TensorboardSink(SinkInputs(run_dir, "a", "b", {}, 3, 0)).close("finished")


def validated(run_dir: Path) -> None:
    from rlctl.train.validate import place_of_evaluation

    write_evaluation(place_of_evaluation(run_dir, 2), evaluation(), [], page=False)


def evaluation() -> Evaluation:
    from rlctl.run_spec.rollout import RewardSpec

    return Evaluation({}, RewardSpec(), [], [], 0.0)


#: The name of a directory of a run that is a link → what writes there.
WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a checkpoint is written": ("checkpoints", lambda run: saved(run / "checkpoints", 4)),
    "old checkpoints are removed": ("checkpoints", lambda run: saved(run / "checkpoints", 4, keep=1)),
    "a checkpoint is replaced": ("checkpoints", lambda run: saved(run / "checkpoints", 3)),
    "a resume sets aside": ("checkpoints", lambda run: newest_intact(run / "checkpoints", set_aside=True)),
    "what was not written is removed": (
        "checkpoints",
        lambda run: remove_unwritten(run / "checkpoints", RlctlError("x", where=str(run / "checkpoints"))),
    ),
    "the newest is named": ("checkpoints", lambda run: point_to(run / "checkpoints", "step_000001", 2)),
    "a resume discards rollouts": ("rollouts", discard),
    "rollouts are written": ("rollouts", write_rollouts),
    "a rank's heartbeat": (".ranks", beat),
    "a validation": ("evaluations", validated),
    "TensorBoard's events": ("tensorboard", tensorboard),
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_directory_that_is_a_link_is_not_entered(run_dir: Path, victim: Path, what: str) -> None:
    """Made after the start of the run, which would have refused it."""
    name, write = WRITERS[what]
    assert name in DIRECTORIES
    (run_dir / name).symlink_to(victim, target_is_directory=True)
    with suppress(RlctlError, OSError):
        write(run_dir)
    assert os.readlink(run_dir / name) == str(victim)  # noqa: PTH115


def link(path: Path, target: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target, target_is_directory=target.is_dir())
    return path


#: A link within a directory of a run: its path, its target in `victim`, and what writes there.
INNER: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "an unfinished checkpoint": (
        "checkpoints/.partial-000004",
        ".partial-000004",
        lambda run: saved(run / "checkpoints", 4),
    ),
    "an unfinished checkpoint at a resume": (
        "checkpoints/.partial-000004",
        ".partial-000004",
        lambda run: newest_intact(run / "checkpoints", set_aside=True),
    ),
    "a checkpoint that is replaced": (
        "checkpoints/step_000003",
        "step_000003",
        lambda run: saved(run / "checkpoints", 3),
    ),
    "a checkpoint that is removed": (
        "checkpoints/step_000001",
        "step_000001",
        lambda run: saved(run / "checkpoints", 3, keep=1),
    ),
    "what was set aside": (
        "checkpoints/damaged-partial-000004",
        "step_000001",
        lambda run: (
            partial_path(run / "checkpoints", 4).mkdir(),
            newest_intact(run / "checkpoints", set_aside=True),
        ),
    ),
    "a file of rollouts": (
        "rollouts/rollouts-000002-000005.parquet",
        "rollouts-000009-000012.parquet",
        discard,
    ),
    "a rank's file": (".ranks/node-00000", "node-00000", beat),
    "an evaluation": ("evaluations/step_000002", "step_000002", validated),
    "an evaluation's leftover": ("evaluations/.step_000002.old-999999999", "step_000002", validated),
    "an evaluation's unfinished one": (
        "evaluations/.step_000002.partial-999999999",
        "step_000002",
        validated,
    ),
    "the metrics": (
        "metrics.jsonl",
        "metrics.jsonl",
        lambda run: JsonlSink(run / "metrics.jsonl").log(1, {}),
    ),
    "the discarded metrics": (
        "metrics.discarded.jsonl",
        "metrics.jsonl",
        lambda run: ((run / "metrics.jsonl").write_text("x\n"), truncate_after(run / "metrics.jsonl", 1)),
    ),
    "dropped episodes": (
        "dropped.jsonl",
        "metrics.jsonl",
        lambda run: DroppedLedger(run, keep_until=1).add(2, [DroppedEpisode(0, 0, 0, "r", 1, 0, None, "p")]),
    ),
}


@pytest.mark.parametrize("what", INNER)
def test_a_link_in_a_directory_is_not_followed(run_dir: Path, victim: Path, what: str) -> None:
    name, target, write = INNER[what]
    link(run_dir / name, victim / target)
    with suppress(RlctlError, OSError):
        write(run_dir)


def test_a_log_from_another_machine_goes_through_no_link(run_dir: Path, victim: Path, monkeypatch) -> None:
    host = RayHost.__new__(RayHost)
    host._log = link(run_dir / "engines/engine-0.log", victim / "engine-0.log")
    monkeypatch.setattr(host, "_ask", lambda *_: (None, b"output"))
    with suppress(OSError):
        host.poll()
    host._log = run_dir / "engines/engine-1.log"
    for output in (b"longer output", b"output"):
        monkeypatch.setattr(host, "_ask", lambda *_, said=output: (1, said))
        assert host.poll() == 1
        assert host._log.read_bytes() == output


@pytest.mark.parametrize("name", [*DIRECTORIES, "environment.json", ".wandb_run_id", "notes", "spec.yaml"])
def test_a_resume_refuses_a_link_that_leads_out(run_dir: Path, victim: Path, name: str) -> None:
    """Before anything is read: what a file of the user says would go into the run's files, or to W&B."""
    (run_dir / name).unlink(missing_ok=True)
    link(run_dir / name, victim)
    with pytest.raises(UsageError) as refused:
        open_run_dir(run_dir, resume=True)
    assert refused.value.where == str(run_dir / name)
    assert str(victim) in refused.value.what
    assert "move the whole run directory" in (refused.value.fix or "")


@pytest.mark.parametrize(
    "name", ["checkpoints/step_000001", "rollouts/a.parquet", ".ranks/node-00000", "engines/engine-0.log"]
)
def test_a_resume_refuses_a_link_further_in(run_dir: Path, victim: Path, name: str) -> None:
    link(run_dir / name, victim)
    with pytest.raises(UsageError, match="leads out of the run"):
        open_run_dir(run_dir, resume=True)
    assert not (run_dir / ".lock").exists()


def test_a_link_to_itself_is_refused(run_dir: Path) -> None:
    (run_dir / "rollouts").symlink_to("rollouts")
    with pytest.raises(UsageError, match="is a link"):
        open_run_dir(run_dir, resume=True)


def test_a_whole_run_on_another_disk_goes_on(tmp_path: Path, run_dir: Path) -> None:
    """The stated way: the run directory itself may be a link, and so may the directories above it."""
    elsewhere = tmp_path / "disk"
    (elsewhere / "runs").mkdir(parents=True)
    shutil.move(run_dir, elsewhere / "runs/one")
    run_dir.symlink_to(elsewhere / "runs/one", target_is_directory=True)
    (tmp_path / "runs").symlink_to(elsewhere / "runs", target_is_directory=True)
    for path in (run_dir, tmp_path / "runs/one"):
        for step in (1, 2, 3):
            saved(path / "checkpoints", step, keep=1)
            point_to(path / "checkpoints", "latest", step)
        write_rollouts(path)
        discard(path)
        beat(path)
        tensorboard(path)
        validated(path)
        validated(path)
        (path / "own-notes").unlink(missing_ok=True)
        (path / "own-notes").symlink_to("spec.yaml")
        with open_run_dir(path, resume=True):
            assert (path / ".lock.json").is_file()
        assert newest_intact(path / "checkpoints", set_aside=True)[0] is not None
        assert [each.name for each in (path / "checkpoints").glob("step_*")] == ["step_000003"]


def test_a_new_run_keeps_links_of_one_that_ended_too_early(run_dir: Path, victim: Path) -> None:
    """They are renamed with the other files, and lead nowhere that the new run writes to."""
    for name in ("checkpoints", "rollouts", "notes"):
        link(run_dir / name, victim)
    with open_run_dir(run_dir, resume=False, is_lost=lambda _: True) as opened:
        earlier = opened.set_aside()
        assert earlier is not None
        assert (earlier / "checkpoints").is_symlink()
        saved(run_dir / "checkpoints", 4, keep=1)
    assert _remove_unused(run_dir)
    assert [path.name for path in run_dir.iterdir()] == ["earlier-1"]


def test_a_run_that_failed_at_once_removes_links_and_not_what_they_name(run_dir: Path, victim: Path) -> None:
    (run_dir / "earlier-1").mkdir()
    for name in ("checkpoints", "notes"):
        link(run_dir / name, victim)
    assert _remove_unused(run_dir)
    assert [path.name for path in run_dir.iterdir()] == ["earlier-1"]


def test_files_of_earlier_runs_have_a_free_name(run_dir: Path) -> None:
    (run_dir / "earlier-2").mkdir()
    with open_run_dir(run_dir, resume=False, is_lost=lambda _: True) as opened:
        assert opened.set_aside() == run_dir / "earlier-1"
        (run_dir / "spec.yaml").write_text("{}")
        assert opened.set_aside() == run_dir / "earlier-3"


def test_a_checkpoint_that_is_a_link_is_none(run_dir: Path, victim: Path) -> None:
    saved(run_dir / "checkpoints", 1)
    link(run_dir / "checkpoints/step_000003", victim / "step_000003")
    found, notes = checkpoint_of_run(run_dir)
    assert found.state.step == 1
    assert "step_000003 is damaged: it is a link" in notes[0]


def test_a_directory_that_becomes_a_link_while_it_is_removed(tmp_path: Path, victim: Path) -> None:
    """Another user exchanges it again and again; a name is never looked up twice."""
    place = tmp_path / "run"
    place.mkdir()
    is_over = threading.Event()

    def exchange() -> None:
        while not is_over.is_set():
            with suppress(OSError):
                (place / "real").mkdir()
                (place / "real/weights").touch()
            (place / "link").symlink_to(victim)
            with suppress(OSError):
                (place / "real").rename(place / "checkpoints")
            with suppress(OSError):
                (place / "checkpoints").rename(place / "old")
            with suppress(OSError):
                (place / "link").rename(place / "checkpoints")
            shutil.rmtree(place / "old", ignore_errors=True)
            for name in ("checkpoints", "link", "old"):
                with suppress(OSError):
                    (place / name).unlink()

    other = threading.Thread(target=exchange)
    other.start()
    for _ in range(2000):
        with suppress(OSError):
            remove(place / "checkpoints/step_000001")
        with suppress(OSError):
            remove(place / "checkpoints")
        with suppress(OSError):
            rename(place / "checkpoints/step_000001", place / "checkpoints/step_000002")
    is_over.set()
    other.join()


def test_the_helpers_say_what_is_wrong(tmp_path: Path, victim: Path) -> None:
    place = link(tmp_path / "rollouts", victim)
    for call in (
        lambda: create_directory(place),
        lambda: remove(place / "step_000001"),
        lambda: rename(place / "step_000001", place / "x"),
    ):
        with pytest.raises(OSError, match="is a link") as refused:
            call()
        assert refused.value.filename == str(place)
    remove(place)
    remove(place)  # nothing is there
    assert not place.is_symlink()
    create_directory(place)
    create_directory(place)
    with pytest.raises(FileNotFoundError):
        create_directory(tmp_path / "none/rollouts")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        create_directory(tmp_path / "file")


def test_the_errors_of_a_run_name_the_link(run_dir: Path, victim: Path) -> None:
    link(run_dir / "rollouts", victim)
    with pytest.raises(RunFailure, match="link"):
        discard(run_dir)
    with pytest.raises(RunFailure, match="link"):
        write_rollouts(run_dir)
