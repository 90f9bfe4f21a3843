"""metrics.jsonl survives kills, takes bad numbers, and repeats no step after a resume."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rlctl.errors import RunFailure
from rlctl.track.jsonl import DISCARDED_FILE, JsonlSink, truncate_after


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_lines_are_flat_and_ordered(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"actor/pg_loss": -0.25, "training/global_step": 1})
    sink.close("finished")
    (line,) = read(tmp_path / "metrics.jsonl")
    assert list(line) == ["step", "timestamp", "actor/pg_loss", "training/global_step"]
    assert line["timestamp"].endswith("+00:00")
    assert line["actor/pg_loss"] == -0.25
    assert line["training/global_step"] == 1


def test_nan_and_infinity_are_standard_json(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(
        1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32("nan"), "e": torch.tensor(1.5)}
    )
    sink.close("finished")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (line["a"], line["b"], line["c"], line["d"], line["e"]) == (
        "NaN",
        "Infinity",
        "-Infinity",
        "NaN",
        1.5,
    )
    assert math.isnan(float(line["a"]))
    assert float(line["c"]) == -math.inf


WRITER = """
import sys
from pathlib import Path
from rlctl.track.jsonl import JsonlSink
sink = JsonlSink(Path(sys.argv[1]))
metrics = {f"group/metric_{i}": i / 7 for i in range(200)}
step = 0
while True:
    step += 1
    sink.log(step, metrics)
"""


def test_sigkill_leaves_every_complete_line_readable(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    deadline = time.monotonic() + 20
    while (not path.exists() or path.stat().st_size < 200_000) and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    data = path.read_bytes()
    *complete, rest = data.split(b"\n")
    lines = [json.loads(line) for line in complete]
    assert len(lines) > 20
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(len(line) == 202 for line in lines)
    assert not rest or not rest.endswith(b"}")
    # and a resumed run continues from there
    assert truncate_after(path, 10) == list(range(1, 11))
    sink = JsonlSink(path)
    sink.log(11, {})
    sink.close("finished")
    assert [line["step"] for line in read(path)] == list(range(1, 12))


def test_resume_moves_later_steps_and_a_half_line_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n{"step": 3, "x": 3}\n{"step": 4, "x"')
    assert truncate_after(path, 2) == [1, 2]
    assert [line["step"] for line in read(path)] == [1, 2]
    assert (tmp_path / DISCARDED_FILE).read_text() == '{"step": 3, "x": 3}\n{"step": 4, "x"\n'
    assert sorted(p.name for p in tmp_path.iterdir()) == [DISCARDED_FILE, "metrics.jsonl"]
    # a second death and resume appends to the discarded ones
    with path.open("a") as file:
        file.write('{"step": 3, "x": 33}\n')
    assert truncate_after(path, 2) == [1, 2]
    assert (tmp_path / DISCARDED_FILE).read_text().endswith('{"step": 3, "x": 33}\n')


def test_nothing_to_take_back_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert truncate_after(path, 5) == []
    assert list(tmp_path.iterdir()) == []
    path.write_text('{"step": 1}\n')
    inode = path.stat().st_ino
    assert truncate_after(path, 5) == [1]
    assert path.stat().st_ino == inode


def test_a_log_that_cannot_be_written_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="cannot be written"):
        JsonlSink(tmp_path / "missing" / "metrics.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_says_so() -> None:
    with pytest.raises(RunFailure, match="No space left"):
        JsonlSink(Path("/dev/full")).log(1, {"a": 1.0})
