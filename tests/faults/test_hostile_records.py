"""Records of a run directory that someone else has written: no pipe, hole, link or number holds a command."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlctl.engine.checkpoint import TrainerState, begin, checkpoint_of_run, newest_intact, publish
from rlctl.errors import RlctlError, UsageError, missing_steps, steps_in_words
from rlctl.files import MAX_TEXT, lines_of, read_text
from rlctl.run_spec.load import load_spec
from rlctl.track import rollouts
from rlctl.track.dropped import DroppedLedger
from rlctl.track.heartbeats import beats_of_node
from rlctl.track.jsonl import decode_line, truncate_after
from rlctl.track.open_run import RunRecord, read_state
from rlctl.track.rollouts import RolloutWriter
from rlctl.track.run_dir import read_mapping
from rlctl.track.sink import SinkInputs
from rlctl.track.tracker import build_tracker

#: A step that a run cannot have trained; a loop over its steps would take years.
ENDLESS = 10**15


def hole(path: Path) -> None:
    """A file of 1 TB that takes no space on the disk, and little in an archive."""
    with path.open("wb") as file:
        file.truncate(10**12)


#: How a file of a directory can hold whoever reads it.
ODD: dict[str, Callable[[Path], None]] = {
    "a pipe without a writer": os.mkfifo,
    "a device without an end": lambda path: path.symlink_to("/dev/zero"),
    "a hole of 1 TB": hole,
    "a directory": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
}
#: What reads a file, as (directory, file) → its result.
READERS: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "record": ("summary.json", lambda directory, file: read_mapping(file)),
    "spec of a list": ("spec.yaml", lambda directory, file: read_mapping(file)),
    "state": ("metrics.jsonl", lambda directory, file: read_state(directory)),
    "metrics": ("metrics.jsonl", lambda directory, file: RunRecord(directory).rows()),
    "resume": ("metrics.jsonl", lambda directory, file: truncate_after(file, 3)),
    "responses": (
        "rollouts/rollouts-000001-000002.parquet",
        lambda directory, file: RolloutWriter(directory, -1).discard_after(2),
    ),
    "checkpoint": ("step_000002/manifest.json", lambda directory, file: newest_intact(directory)),
    "heartbeat": (".ranks/node-00000", lambda directory, file: beats_of_node(directory, 0, 1)),
    "dropped episodes": ("dropped.jsonl", lambda directory, file: DroppedLedger(directory, keep_until=1)),
    "options in a file": (
        "options.json",
        lambda directory, file: load_spec(overrides=["rollout.name=vllm", f"rollout.engine_kwargs={file}"]),
    ),
}


def ends(call: Callable[[], Any]) -> Any:
    """The result, or the error for the user, of a call that must come back."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60.0)
    assert found, "it waits"
    [result] = found
    if isinstance(result, BaseException) and not isinstance(result, RlctlError):
        raise result
    return result


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("reader", READERS)
def test_no_odd_file_holds_what_reads_it(tmp_path: Path, reader: str, odd: str) -> None:
    name, read = READERS[reader]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    ODD[odd](file)
    ends(lambda: read(tmp_path, file))


def test_what_is_read_whole_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_TEXT >= 2**20
    monkeypatch.setattr("rlctl.files.MAX_TEXT", 100)
    file = tmp_path / "file"
    for length, is_read in ((99, True), (100, True), (101, False)):
        file.write_bytes(b"a" * (length - 1) + b"\n")
        for read in (read_text, lambda path: list(lines_of(path))):
            if is_read:
                assert len(read(file)) in {1, length}
            else:
                with pytest.raises(OSError, match="more than"):
                    read(file)
    file.write_bytes(b"a" * 60 + b"\n" + b"b" * 60)
    assert [len(line) for line in lines_of(file)] == [61, 60]


VALUES: tuple[Any, ...] = (True, "text", [1], {"a": 1}, 10**400, -(10**30), "[" * 3000, [[[[]]]])


@pytest.mark.parametrize("key", ["step", "timestamp", "critic/score/mean", "val/x/reward_mean"])
def test_an_edited_line_of_metrics_is_no_bug(tmp_path: Path, key: str) -> None:
    """Each value replaced; whoever reads the log says which line is wrong, or takes it as no line."""
    (tmp_path / "spec.yaml").write_text("{}")
    good = {"step": 1, "timestamp": "2026-01-01T00:00:00+00:00", "critic/score/mean": 0.5}
    for value in VALUES:
        text = json.dumps(good | {key: value})
        (tmp_path / "metrics.jsonl").write_text(f"{text}\n{json.dumps(good | {'step': 2})}\n")
        read_state(tmp_path)
        record = RunRecord(tmp_path)
        for read in (record.rows, record.metrics):
            found = ends(read)
            if isinstance(found, UsageError):
                assert found.where == f"{tmp_path / 'metrics.jsonl'}:1", value
            else:
                assert len(found) == 2
        assert truncate_after(tmp_path / "metrics.jsonl", 2)[-1] == 2


def test_brackets_without_end_are_no_line() -> None:
    with pytest.raises(ValueError, match="brackets"):
        decode_line(b'{"step": 1, "a": ' + b"[" * 200_000)


@pytest.mark.parametrize("step", [0, 1, 5, 100_000, ENDLESS])
def test_no_loop_goes_over_the_steps_of_a_run(tmp_path: Path, step: int) -> None:
    """A checkpoint's step and the names of files are numbers of whoever wrote the directory."""
    inputs = SinkInputs(tmp_path, "a", "b", {}, ENDLESS + 1, step)
    ends(lambda: build_tracker([], inputs).close())
    (tmp_path / "rollouts").mkdir()
    for first, last in ((1, ENDLESS), (ENDLESS - 1, ENDLESS)):
        (tmp_path / "rollouts" / f"rollouts-{first:06d}-{last:06d}.parquet").write_bytes(b"PAR1")
    notes = ends(lambda: RolloutWriter(tmp_path, -1).discard_after(step))
    assert (f"1 to {step}" in notes[-1]) == (step > 1), notes


def test_a_part_that_claims_endless_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "_damage", lambda path, schema: "")
    (tmp_path / "rollouts").mkdir()
    part = tmp_path / "rollouts" / f"rollouts-000003-{ENDLESS:06d}.parquet"
    part.write_bytes(b"")
    assert ends(lambda: RolloutWriter(tmp_path, -1).discard_after(ENDLESS)) == [
        "warning: rollouts/ has no responses of steps 1 to 2"
    ]


@pytest.mark.parametrize(
    ("known", "last", "missing"),
    [
        ([], 0, []),
        ([], 3, [range(1, 4)]),
        ([range(1, 4)], 3, []),
        ([range(2, 3), range(5, 6)], 6, [range(1, 2), range(3, 5), range(6, 7)]),
        ([range(5, 9), range(1, 3)], 6, [range(3, 5)]),
        ([range(0, 3), range(2, 5)], 4, []),
        ([range(7, 9)], 4, [range(1, 5)]),
        ([range(-3, 0), range(3, 3)], 2, [range(1, 3)]),
    ],
)
def test_missing_steps(known: list[range], last: int, missing: list[range]) -> None:
    assert missing_steps(known, last) == missing
    singly = [range(step, step + 1) for each in known for step in each]
    assert missing_steps(singly, last) == missing


def test_steps_in_words_of_many() -> None:
    assert steps_in_words([1, 2, 3, 4, 7]) == "steps 1 to 4, 7"
    assert steps_in_words([range(1, 5), 7]) == "steps 1 to 4, 7"
    assert steps_in_words([3]) == steps_in_words([range(3, 4)]) == "step 3"
    assert steps_in_words(range(1, 300_000)) == "steps 1 to 299999"  # a square of this would take minutes


@pytest.mark.parametrize("what", ["link to a file", "link to a directory", "link within", "pipe"])
def test_a_checkpoint_has_no_links(tmp_path: Path, what: str) -> None:
    """`export` and `evaluate` would copy or read a secret of this user, which the checksums may leave out."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/secret").write_text("pl41n")
    root = tmp_path / "run/checkpoints"
    root.mkdir(parents=True)
    for step in (1, 2):
        partial = begin(root, step)
        (partial / "model/weights").write_text("w")
        published = publish(root, partial, TrainerState(step, step, 1), keep=None).path
    planted = published / "model/notes.txt"
    match what:
        case "link to a file":
            planted.symlink_to(tmp_path / "home/secret")
        case "link to a directory":
            planted.symlink_to(tmp_path / "home", target_is_directory=True)
        case "link within":
            planted.symlink_to("weights")
        case _:
            os.mkfifo(planted)
    found, notes = checkpoint_of_run(tmp_path / "run")
    assert found.state.step == 1
    assert "model/notes.txt is a link, or no file" in notes[0]
