"""Several runs at one path: each is found and read; the logs of one run count once. ZIP archives."""

import gzip
import io
import json
import os
import struct
import zipfile

import numpy as np
import pytest

from rlctl.cli.app import run as run_command
from rlctl.diagnose.readers import runs, source
from rlctl.diagnose.readers.detect import read_run, read_runs
from rlctl.errors import UsageError
from rlctl.metric_names import ELSEWHERE, METRICS

EVERYTHING = frozenset({*METRICS, *ELSEWHERE})


def verl(seed, num_steps=12):
    """A log of verl whose values depend on the seed."""
    values = np.random.default_rng(seed)
    return "".join(
        f"step:{step} - actor/entropy:{values.uniform(0.3, 1.0):.4f} - "
        f"critic/score/mean:{values.uniform(0.2, 0.8):.4f} - "
        f"response_length/mean:{values.uniform(90, 400):.2f} - actor/lr:1e-06 - perf/mfu/actor:0.25\n"
        for step in range(1, num_steps + 1)
    )  # fmt: skip


def rows(seed, num_steps=12):
    """The rows of the same run in JSON, with full precision."""
    values = np.random.default_rng(seed)
    return "".join(
        json.dumps({"step": step, "actor/entropy": values.uniform(0.3, 1.0),
                    "critic/score/mean": values.uniform(0.2, 0.8),
                    "response_length/mean": values.uniform(90, 400)})
        + "\n"
        for step in range(1, num_steps + 1)
    )  # fmt: skip


def names(path):
    return [str(run.path.relative_to(path)) for run in read_runs(path, EVERYTHING)]


@pytest.fixture
def sixty(tmp_path):
    for number in range(60):
        (tmp_path / f"run{number:03}.log").write_text(verl(number))
    for number in (7, 40, 41, 59):
        path = tmp_path / f"run{number:03}.log"
        path.write_text(path.read_text() + "step:13 - actor/grad_norm:nan - perf/mfu/actor:0.25\n")
    return tmp_path


def test_every_run_of_a_directory_is_read_and_listed(sixty, capsys):
    code = run_command(["diagnose", str(sixty), "--fail-on", "critical", "--format", "json"])
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert (code, len(runs)) == (3, 60)
    sick = [run["log"][-10:-4] for run in runs if run["status"] == "critical"]
    assert sick == ["run007", "run040", "run041", "run059"]
    with pytest.raises(UsageError, match=r"several runs, such as .*run000\.log, .*run001\.log"):
        read_run(sixty, EVERYTHING)


def test_the_text_lists_the_runs_first(tmp_path, capsys):
    for seed in (1, 2):
        (tmp_path / f"{seed}.log").write_text(verl(seed) + "Segmentation fault\n" * (seed - 1))
    assert run_command(["diagnose", str(tmp_path)]) == 0
    begin, _, first, second, third = capsys.readouterr().out.splitlines()[:5]
    assert begin.startswith(f"1 of 2 runs are sick; begin with {tmp_path}/2.log: ")
    assert first.split() == ["run", "logged", "by", "steps", "status", "first", "finding"]
    assert second.split()[1:3] == third.split()[1:3] == ["verl", "12"]
    assert "critical" in second
    assert "Segmentation fault" in second


@pytest.mark.parametrize("places", [("a/run.log", "a/out.jsonl"), ("a/run.log", "a/b/c/out.jsonl"),
                                    ("a/x/run.log", "a/y/out.jsonl")])  # fmt: skip
def test_logs_with_the_same_values_are_of_one_run(tmp_path, places):
    for place, content in zip(places, (verl(1), rows(1)), strict=True):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(content)
    assert len(names(tmp_path)) == 1


def test_rows_that_are_counted_match_those_with_steps(tmp_path):
    """A printed dictionary has no step; the trainer's state has those of every tenth update."""
    history = [{"step": 10 * n, "loss": 0.1 * n, "reward": n / 9, "completions/mean_length": 40.0 + 9 * n,
                "epoch": n / 10} for n in range(1, 9)]  # fmt: skip
    printed = [{key: value for key, value in row.items() if key != "step"} for row in history]
    (tmp_path / "checkpoint-80").mkdir()
    (tmp_path / "checkpoint-80" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (tmp_path / "train.log").write_text("".join(f"{row}\n" for row in printed))
    assert len(names(tmp_path)) == 1


def test_runs_of_one_parent_are_apart_and_an_error_without_a_row_is_a_run(tmp_path):
    for seed in (1, 2):
        (tmp_path / f"seed{seed}" / "tb").mkdir(parents=True)
        (tmp_path / f"seed{seed}" / "run.log").write_text(verl(seed))
        (tmp_path / f"seed{seed}" / "tb" / "scalars.jsonl").write_text(rows(seed))
    (tmp_path / "seed3").mkdir()
    (tmp_path / "seed3" / "run.log").write_text("Traceback (most recent call last):\nKeyError: 'x'\n")
    assert [name.partition("/")[0] for name in names(tmp_path)] == ["seed1", "seed2", "seed3"]


def test_samples_with_their_step_are_no_log(tmp_path):
    """As verl dumps the responses of a step."""
    (tmp_path / "run.log").write_text(verl(1))
    for step in (1, 2, 3):
        dumped = "".join(
            json.dumps({"step": step, "input": "2 + 2", "score": n % 2}) + "\n" for n in range(16)
        )
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        (tmp_path / "rollouts" / f"{step}.jsonl").write_text(dumped)
    assert names(tmp_path) == ["run.log"]


# --- ZIP archives ---------------------------------------------------------------------------------------


def archive(path, **files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            packed.writestr(name.replace("__", "/") + ".log", content)
    return path


def test_an_archive_is_read_like_a_directory(tmp_path):
    path = archive(tmp_path / "logs.zip", a=verl(1), b__c=verl(2))
    first, second = read_runs(path, EVERYTHING)
    assert (first.path, second.path) == (path / "a.log", path / "b/c.log")
    assert len(first.table.steps) == 12
    assert read_run(archive(tmp_path / "one", a=verl(1)), EVERYTHING).framework == "verl"


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_LARGEST_UNPACKED", 1 << 20)
    path = archive(tmp_path / "bomb.zip", a=b"\0" * (1 << 20), b=b"\0" * (1 << 20))
    with pytest.raises(UsageError, match="expands to 2,097,152 bytes"):
        read_run(path, EVERYTHING)


def test_a_compressed_log_that_expands_to_too_much_is_read_up_to_there(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "_LARGEST_UNPACKED", 1 << 20)
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(verl(1).encode() + b"more\n" * (1 << 20)))
    run = read_run(path, EVERYTHING)
    assert len(run.table.steps) == 12
    assert any("expands to more than 1,048,576 bytes" in note for note in run.notes)


def test_pipes_and_devices_of_a_directory_are_no_logs(tmp_path):
    """They may never end."""
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "zeros.jsonl").symlink_to("/dev/zero")
    (tmp_path / "elsewhere").write_text(verl(1))
    (tmp_path / "linked.log").symlink_to("elsewhere")
    assert [log.shown.name for log in runs._logs(tmp_path)] == ["linked.log"]


def test_a_log_that_cannot_be_read_says_why(capsys):
    assert run_command(["diagnose", "/proc/self/mem"]) == 2
    assert "cannot be read: Input/output error" in " ".join(capsys.readouterr().err.split())


def test_an_archive_writes_nowhere_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as packed:
        packed.writestr("../../outside.log", verl(1))
        packed.writestr("/absolute.log", verl(2))
    path = tmp_path / "logs.zip"
    assert {run.path for run in read_runs(path, EVERYTHING)} == {path / "outside.log", path / "absolute.log"}
    assert not [*tmp_path.parent.glob("*.log"), *tmp_path.parent.parent.glob("*.log")]


@pytest.mark.parametrize("kind", ["cut", "flags"])
def test_an_archive_that_cannot_be_read_is_refused(tmp_path, kind):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("a.log", verl(1))
    content = bytearray(buffer.getvalue())
    if kind == "flags":  # encrypted, says the directory
        place = content.index(b"PK\x01\x02") + 8
        content[place : place + 2] = struct.pack("<H", 1)
    (tmp_path / "logs.zip").write_bytes(content[:-30] if kind == "cut" else content)
    with pytest.raises(UsageError, match=r"cannot be read as a zip archive|is encrypted"):
        read_run(tmp_path / "logs.zip", EVERYTHING)
