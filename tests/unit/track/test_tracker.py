"""Fan-out: every sink gets every step, and no sink but the record can stop a run."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlctl.errors import UsageError
from rlctl.track import sink as sinks
from rlctl.track.jsonl import JsonlSink
from rlctl.track.sink import BackgroundSink, SinkInputs
from rlctl.track.tracker import Tracker, build_tracker


def steps(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def build(run_dir: Path, *loggers: str, start_step: int = 0) -> Tracker:
    inputs = SinkInputs(run_dir, "project", "experiment", {"lr": 1e-3}, total_steps=5, start_step=start_step)
    return build_tracker(loggers, inputs)


class Broken:
    name = "broken"

    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("no network, key hf_abcdefghijklmnopqrstuv\nmore")

    def close(self, status: str) -> None:
        raise RuntimeError("close failed too")


def test_a_failing_sink_warns_once_and_is_dropped(tmp_path: Path) -> None:
    notes: list[str] = []
    broken = Broken()
    with Tracker(JsonlSink(tmp_path / "metrics.jsonl"), [broken], show=notes.append) as tracker:
        for step in range(1, 4):
            tracker.log(step, {"a": 1.0})
    assert broken.calls == 1
    assert len(notes) == 1
    assert "broken failed" in notes[0]
    assert "ConnectionError: no network" in notes[0]
    assert "hf_" not in notes[0]
    assert steps(tmp_path) == [1, 2, 3]


class Hanging:
    name = "hanging"

    def __init__(self, hangs: threading.Event) -> None:
        self.hangs, self.steps = hangs, []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.hangs.wait(60)
        self.steps.append(step)

    def close(self, status: str) -> None:
        self.steps.append(-1)


def test_a_slow_tracker_gets_every_step_and_training_does_not_wait(tmp_path: Path) -> None:
    goes_on = threading.Event()
    slow = Hanging(goes_on)
    with Tracker(JsonlSink(tmp_path / "metrics.jsonl"), [BackgroundSink(slow)]) as tracker:
        for step in range(1, 4):
            tracker.log(step, {"a": 1.0})
        assert steps(tmp_path) == [1, 2, 3]
        assert slow.steps == []
        goes_on.set()
    assert slow.steps == [1, 2, 3, -1]


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "CLOSE_S", 0.1)
    monkeypatch.setattr(sinks, "MAX_WAITING", 2)
    notes: list[str] = []
    goes_on = threading.Event()
    hanging = BackgroundSink(Hanging(goes_on))
    with Tracker(JsonlSink(tmp_path / "metrics.jsonl"), [hanging], show=notes.append) as tracker:
        tracker.log(1, {"a": 1.0})
    assert "not finished" in notes[-1]
    crowded = BackgroundSink(Hanging(goes_on))
    with Tracker(JsonlSink(tmp_path / "metrics.jsonl"), [crowded], last_step=1, show=notes.append) as tracker:
        for step in range(2, 9):
            tracker.log(step, {"a": 1.0})
    assert steps(tmp_path) == list(range(1, 9))
    assert sum("hanging failed and is disabled" in note for note in notes) == 1
    goes_on.set()


def test_steps_that_are_lost_at_the_end_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is full when the run ends, and no step was refused before."""
    monkeypatch.setattr(sinks, "MAX_WAITING", 2)
    notes: list[str] = []
    goes_on = threading.Event()
    sink = BackgroundSink(Hanging(goes_on))
    with Tracker(JsonlSink(tmp_path / "metrics.jsonl"), [sink], show=notes.append) as tracker:
        tracker.log(1, {"a": 1.0})
        while not sink._steps.empty():  # the sink hangs in the first step
            time.sleep(0.01)
        tracker.log(2, {"a": 1.0})
        tracker.log(3, {"a": 1.0})
        assert notes == []
    assert notes == ["warning: hanging did not close cleanly: TimeoutError: 2 steps are waiting for it"]
    goes_on.set()


def test_a_tracker_that_cannot_write_is_dropped_with_its_reason(tmp_path: Path) -> None:
    notes: list[str] = []
    sink = BackgroundSink(Broken())
    with Tracker(JsonlSink(tmp_path / "metrics.jsonl"), [sink], show=notes.append) as tracker:
        tracker.log(1, {"a": 1.0})
        sink._thread.join()
        tracker.log(2, {"a": 1.0})
    assert steps(tmp_path) == [1, 2]
    assert "broken failed and is disabled, training continues (ConnectionError: no network" in notes[0]


def test_notes_cannot_steer_the_terminal() -> None:
    notes: list[str] = []
    with Tracker(show=notes.append) as tracker:
        tracker.note("warning: \x1b[2Jthe grader said\x07")
    assert notes == ["warning: \\x1b[2Jthe grader said\\x07"]


class BrokenDisplay(Broken):
    def begin_phase(self, phase: str) -> None:
        raise KeyError(phase)

    def note(self, text: str) -> None:
        raise RuntimeError("no display")


def test_a_display_that_fails_does_not_stop_training(tmp_path: Path) -> None:
    display = BrokenDisplay()
    with Tracker(JsonlSink(tmp_path / "metrics.jsonl"), [display], show=display.note) as tracker:
        tracker.begin_phase("gen")
        tracker.log(1, {"a": 1.0})
    assert (display.calls, steps(tmp_path)) == (0, [1])


def test_a_resume_says_which_steps_its_log_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with build(tmp_path) as tracker:
        for step in range(1, 7):
            tracker.log(step, {"a": 1.0})
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], "{damaged\n", lines[2], *lines[4:]]))
    with build(tmp_path, start_step=5) as tracker:
        pass
    assert "has no readable line of steps 2, 4, which this run has trained" in capsys.readouterr().err
    file.unlink()
    with build(tmp_path, start_step=5) as tracker:
        pass
    assert "no readable line of steps 1 to 5" in capsys.readouterr().err


def test_a_terminal_that_goes_away_does_not_stop_training(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from rlctl.track.sink import SinkInputs
from rlctl.track.tracker import build_tracker
inputs = SinkInputs(Path(sys.argv[1]), "p", "e", {}, total_steps=3, start_step=0)
with build_tracker(["console"], inputs) as tracker:
    sys.stdin.read()
    for step in (1, 2, 3):
        tracker.log(step, {"critic/score/mean": 0.5})
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdin is not None
    child.stdout.close()
    child.stdin.close()
    child.wait(120)
    assert steps(tmp_path) == [1, 2, 3]


def test_steps_only_go_up(tmp_path: Path) -> None:
    with build(tmp_path) as tracker:
        tracker.log(0, {"val/x/reward_mean": 0.1})
        tracker.log(1, {})
        with pytest.raises(ValueError, match="step 1 logged after step 1"):
            tracker.log(1, {})


def test_ranks_without_sinks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Tracker() as tracker:
        tracker.log(1, {"a": 1.0})
        tracker.note("nobody asked")
    assert capsys.readouterr() == ("", "")


def test_resume_appends_without_a_duplicate_step(tmp_path: Path) -> None:
    with build(tmp_path) as tracker:
        for step in (1, 2, 3, 4):
            tracker.log(step, {"a": 1.0})
    with build(tmp_path, start_step=2) as tracker:
        for step in (3, 4, 5):
            tracker.log(step, {"a": 2.0})
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_tensorboard_is_read_back(tmp_path: Path) -> None:
    with build(tmp_path, "tensorboard") as tracker:
        tracker.log(1, {"actor/pg_loss": 0.5, "critic/score/mean": float("nan")})
        tracker.log(2, {"actor/pg_loss": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/pg_loss")] == [(1, 0.5), (2, 0.25)]
    assert "critic/score/mean" in events.Tags()["scalars"]


def test_tensorboard_after_a_resume_shows_no_step_twice(tmp_path: Path) -> None:
    for start, value in ((0, 1.0), (2, 2.0)):
        with build(tmp_path, "tensorboard", start_step=start) as tracker:
            for step in range(start + 1, 5):
                tracker.log(step, {"a": value})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


WANDB = """
import sys
from pathlib import Path
from rlctl.track.sink import SinkInputs
from rlctl.track.tracker import build_tracker
config = {"model": {"path": "x"}, "hub": {"token": "very-secret"}}
inputs = SinkInputs(Path(sys.argv[1]), "p", "e", config, total_steps=2, start_step=0)
with build_tracker(["wandb"], inputs) as tracker:
    tracker.log(1, {"critic/score/mean": 0.5, "actor/entropy": float("nan")})
    tracker.log(2, {"critic/score/mean": 0.75})
"""


def run_wandb(tmp_path: Path, more: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    home = tmp_path / "home"
    home.mkdir()
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", WANDB + more, str(run_dir), "--token", "secret-argument"],
        env={**clean, "HOME": str(home), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )


def test_wandb_offline_for_real(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = run_wandb(tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    assert b"critic/score/mean" in data
    assert b"very-secret" not in data
    everything = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path for path in everything if b"secret-argument" in path.read_bytes()] == []
    assert steps(tmp_path / "run") == [1, 2]


def test_wandb_reads_no_settings_of_the_working_directory(tmp_path: Path) -> None:
    """They could name the server that gets the user's API key."""
    pytest.importorskip("wandb")
    for directory in (tmp_path, tmp_path / "run"):
        (directory / "wandb").mkdir(parents=True)
        (directory / "wandb/settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    shown = "\nimport wandb\nprint(wandb.setup().settings.base_url, Path.cwd())\n"
    done = run_wandb(tmp_path, shown, WANDB_MODE="offline", WANDB_API_KEY="a" * 40)
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1" not in done.stdout + done.stderr
    assert str(tmp_path) in done.stdout


def test_wandb_with_a_bad_key_does_not_stop_training(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = run_wandb(tmp_path, WANDB_API_KEY="bad")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: wandb failed") == 1
    assert steps(tmp_path / "run") == [1, 2]


def test_wandb_that_cannot_start_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr(wandb, "init", refuse)
    with build(tmp_path, "wandb") as tracker:
        tracker.log(1, {})
    assert "network is unreachable" in capsys.readouterr().err
    assert steps(tmp_path) == [1]


def test_wandb_is_loaded_only_when_asked_for(tmp_path: Path) -> None:
    code = WANDB.replace('["wandb"]', "[]") + "\nsys.exit('wandb' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


MINE = """
class Lines:
    name = "lines"

    def __init__(self, file, config):
        self.file, self.config = file, config

    def log(self, step, metrics):
        with self.file.open("a") as out:
            print(step, metrics["a"], self.config, file=out)

    def close(self, status):
        with self.file.open("a") as out:
            print(status, file=out)


def lines(inputs):
    return Lines(inputs.run_dir / "lines.txt", inputs.config)
"""


def test_a_tracker_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = {"lr": 1e-3, "wandb_api_key": "0123456789abcdef0123456789abcdef01234567"}
    loggers = [f"{tmp_path}/mine.py:lines"]
    inputs = SinkInputs(tmp_path, "p", "e", config, total_steps=2, start_step=0)
    with build_tracker(loggers, inputs) as tracker:
        tracker.log(1, {"a": 0.5})
    written = (tmp_path / "lines.txt").read_text().splitlines()
    assert written[0].startswith("1 0.5 ")
    assert "0123456789" not in written[0]
    assert written[1] == "finished"


def test_the_example_leaves_out_a_validation_before_the_first_step(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples/custom_tracker.py"
    with build(tmp_path, f"{example}:Lines") as tracker:
        tracker.log(0, {"val/x/reward_mean": 0.1})
        tracker.log(1, {"critic/score/mean": 0.5})
    assert (tmp_path / "lines.txt").read_text() == "1 0.5\n"


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tracker `wandbb`"):
        build(tmp_path, "wandbb")
