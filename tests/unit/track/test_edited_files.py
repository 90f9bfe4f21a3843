"""Files of a run directory that someone edited: each value replaced by others, each file by garbage."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.engine.checkpoint import TrainerState, begin, newest_intact, publish
from rlctl.errors import RlctlError
from rlctl.track.open_run import is_running, read_state
from rlctl.track.run_dir import note_in_environment, open_run_dir
from rlctl.train.resume import compare_inputs

VALUES = (None, True, 3, -1.5, 10**400, "text", [1, "a", None], {"a": {"b": 1}})
GARBAGE = (b"", b"\xff\xfe", b"[1, 2]", b'"text"', b"{", b"[" * 3000, b"null", b"\0" * 100)
FILES: dict[str, dict[str, Any]] = {
    "environment.json": {
        "time": "2026-01-01T00:00:00+00:00",
        "command": ["rlctl", "train", "-p", "a"],
        "host": "here",
        "packages": {"torch": "2"},
        "total_steps": 6,
        "history": [{"time": "2025-01-01T00:00:00+00:00", "command": ["rlctl"]}],
    },
    "inputs.json": {"files": {"a": "0"}, "rows": {"data.train_files": "1"}},
    "summary.json": {
        "step": 2,
        "total_steps": 6,
        "interrupted": True,
        "guardrails": {"stopped_because": "x"},
    },
    "failure.json": {"what": "w", "where": "h", "fix": "f"},
    ".lock.json": {"pid": 1, "host": "here"},
    "spec.yaml": {"trainer": {"total_training_steps": 6, "experiment_name": "a"}, "model": {"path": "m"}},
}


def edited(content: dict[str, Any]) -> Iterator[bytes]:
    """The content with each value, at any depth, replaced by each of `VALUES`, or left out."""

    def places(value: Any) -> Iterator[tuple[Any, Any]]:
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            if isinstance(value[key], dict | list):
                yield from places(value[key])

    for number in range(len(list(places(content)))):
        for value in (*VALUES, ...):
            copy = json.loads(json.dumps(content))
            owner, key = list(places(copy))[number]
            if value is ...:
                del owner[key]
            else:
                owner[key] = value
            yield json.dumps(copy).encode()


def read_everything(run: Path) -> None:
    """What commands read and a resume updates; an error must be one for the user."""
    read_state(run)
    is_running(run)
    with contextlib.suppress(RlctlError), open_run_dir(run, resume=True) as opened:
        opened.write_environment(["rlctl"])
        note_in_environment(run, total_steps=6)
        for part in ("files", "rows"):
            compare_inputs(run, part, {"a": "0"}, accepts=False)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlctl.track.run_dir.environment_record", lambda argv: {"command": list(argv)})
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("name", FILES)
def test_no_edit_is_a_bug(tmp_path: Path, name: str) -> None:
    contents = {other: json.dumps(content).encode() for other, content in FILES.items()}
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "critic/score/mean": 0.5}\n')
    for text in (*edited(FILES[name]), *GARBAGE):
        for other, content in contents.items():
            (tmp_path / other).write_bytes(text if other == name else content)
        try:
            read_everything(tmp_path)
        except Exception as error:
            error.add_note(f"{name}: {text[:300]!r}")
            raise


def test_earlier_records_that_are_fine_are_kept(tmp_path: Path) -> None:
    record = FILES["environment.json"] | {"history": ["text", {"time": "then"}, 3]}
    (tmp_path / "environment.json").write_text(json.dumps(record))
    with open_run_dir(tmp_path, resume=True) as opened:
        opened.write_environment(["rlctl"])
    history = json.loads((tmp_path / "environment.json").read_text())["history"]
    assert [entry["time"] for entry in history] == ["then", record["time"]]


@pytest.mark.parametrize("has_checksum", [False, True])
def test_an_edited_manifest_is_a_damaged_checkpoint(tmp_path: Path, has_checksum: bool) -> None:
    """Whoever edits it may compute its checksum anew, or leave it out as old versions did."""
    from rlctl.engine import checkpoint

    partial = begin(tmp_path, 2)
    (partial / "model" / "weights").write_text("w")
    path = publish(tmp_path, partial, TrainerState(2, 5, 1, 0.5), keep=None).path
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("manifest_sha256")
    known = (2, 5, 1)
    for text in edited(manifest):
        content = json.loads(text)
        digest = {"manifest_sha256": checkpoint._digest(content)} if has_checksum else {}
        (path / "manifest.json").write_text(json.dumps(content | digest))
        found, notes = newest_intact(tmp_path)
        if found is not None:
            state = found.state
            assert all(type(n) is int and n >= 0 for n in (state.policy_version, state.world_size)), text
            assert state.step == known[0]
            assert state.kl_coef is None or type(state.kl_coef) in (int, float)
        else:
            assert "step_000002 is damaged" in notes[0]
    content = manifest | {"state": manifest["state"] | {"policy_version": "5"}}
    (path / "manifest.json").write_text(json.dumps(content))
    assert "policy_version is '5'" in newest_intact(tmp_path)[1][0]
