"""Plain lines in a pipe; a live panel in a terminal, which is restored after any error."""

import io
import os
import pty
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console

from rlctl.track import console as console_module
from rlctl.track.console import ConsoleSink, Startup, clock, condensed, plain_line, sparkline

METRICS = {
    "critic/score/mean": 0.41,
    "rollout_corr/rollout_is_eff_sample_size": 0.934,
    "rollout_corr/rollout_is_raw_eff_sample_size": 0.871,
    "rollout_corr/rollout_rs_masked_fraction": 0.021,
    "rollout_corr/kl": 0.0012,
    "actor/entropy": 1.234,
    "actor/grad_norm": 0.567,
    "actor/lr": 3e-4,
    "perf/total_num_tokens": 30_600.8,  # of four ranks
    "perf/time_per_step": 2.0,
    "perf/throughput": 3825.1,
    "response_length/mean": 12.5,
    "timing_s/step": 5.0,
    "timing_s/gen": 1.5,
    "timing_s/reward": 0.5,
    "timing_s/update_critic": 1.0,
    "timing_s/update_actor": 2.0,
}
VALIDATED = {"val/gsm8k/reward_mean": 0.75}
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

PROGRAM = f"""
import os, sys, time
TERM = os.environ.get("TERM")
from rlctl.track.tracker import Tracker
from rlctl.track.console import ConsoleSink
METRICS = {METRICS!r}
VALIDATED = {VALIDATED!r}
asked = []
sink = ConsoleSink("p/e", 240, is_stopping=lambda: bool(asked))
with Tracker(None, [sink], show=sink.note) as tracker:
    for step in range(1, 13):
        tracker.log(step, METRICS | {{"critic/score/mean": step / 20}} | (VALIDATED if step == 6 else {{}}))
        time.sleep(0.05)
        if step == 6:
            tracker.note("something to say")
    assert tracker.has_panel == (sys.stdout.isatty() and TERM != "dumb")
    tracker.begin_phase("gen")
    tracker.begin_phase("step")
    time.sleep(0.4)
    asked.append(1)
    tracker.begin_phase("update_actor")
    time.sleep(0.4)
    if sys.argv[1:]:
        raise RuntimeError("boom")
"""


def in_terminal(*arguments: str, term: str = "xterm-256color") -> str:
    """What the program writes to a pseudo-terminal of 100 columns."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": term, "COLUMNS": "100", "LINES": "30", "PYTHONIOENCODING": "utf-8"}
    environment.pop("NO_COLOR", None)
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        close_fds=True,
    )
    os.close(slave)
    chunks: list[bytes] = []
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    child.wait(120)
    os.close(master)
    return b"".join(chunks).decode()


def test_the_panel_in_a_terminal() -> None:
    output = in_terminal()
    text = ANSI.sub("", output)
    for expected in (
        *("step 12/240", "elapsed", "left", "reward", "0.600", "0.934, raw 0.871", "2.1%", "1.20e-03"),
        *("entropy", "1.234", "grad norm", "0.567", "3.00e-04", "15,300", "12.5", "▁", "█", "p/e"),
    ):
        assert expected in text
    assert "something to say" in text
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_the_panel_shows_phases_validation_and_that_it_is_stopping() -> None:
    output = in_terminal()
    text = ANSI.sub("", output)
    shares = "time sampling 30%, grading 10%, updating 60%"
    assert re.search(rf"now sampling +{shares}", text)
    assert re.search(rf"now updating +{shares}", text)
    assert re.search(r"validation gsm8k 0\.750", text)
    stopping = text.index("│ stopping after this step; press Ctrl-C again to stop now ")
    assert text.index("now sampling") < stopping
    assert "\x1b[32m0.934" in output  # green: the raw and the applied ESS are high


def test_the_terminal_is_given_back_on_an_exception() -> None:
    output = in_terminal("fail")
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    after = output[output.rindex("\x1b[?25h") :]
    assert "RuntimeError: boom" in after


def test_a_dumb_terminal_gets_plain_lines() -> None:
    output = in_terminal(term="dumb")
    assert "\x1b" not in output
    assert "step 1/240" in output


def test_a_pipe_gets_plain_lines() -> None:
    environment = {**os.environ, "FORCE_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=True,
    )
    assert "\x1b" not in done.stdout
    first, validated, note, last = done.stdout.splitlines()
    start = "step 1/240 reward 0.05 ess 0.93 masked 0.02 kl 0.0012 tok/s 15,300 left "
    assert re.fullmatch(re.escape(start) + r"\d:\d\d", first)  # on a busy machine the first step is slow
    assert validated.startswith("step 6/240 reward 0.30")
    assert validated.endswith(" validation gsm8k 0.750")
    assert note == "something to say"
    assert last.startswith("step 12/240 reward 0.60")
    assert "validation" not in last


def test_a_plain_line_every_two_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    sink = ConsoleSink("t", 10, stream=stream)
    for step in range(1, 11):
        now[0] += 0.75
        sink.log(step, {"critic/score/mean": 0.5})
    sink.close("finished")
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "7/10", "10/10"]
    assert lines[1] == "step 4/10 reward 0.50 left 0:04"
    assert "left" not in lines[-1]


def test_a_plain_line_shows_the_validation_of_its_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    stream = io.StringIO()
    sink = ConsoleSink("t", 3, stream=stream)
    sink.log(0, {"val/a/reward_mean": 0.25, "val/b\x1b/reward_mean": float("nan")})
    sink.log(1, {"critic/score/mean": 0.5})  # too soon after the line before
    sink.log(2, {"critic/score/mean": 0.5} | VALIDATED)
    sink.log(3, {"critic/score/mean": 0.5})
    sink.close("finished")
    assert stream.getvalue().splitlines() == [
        "step 0/3 validation a 0.250 validation b\\x1b nan",
        "step 2/3 reward 0.50 left 0:00 validation gsm8k 0.750",
        "step 3/3 reward 0.50",
    ]


def test_time_left_follows_the_recent_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    sink = ConsoleSink("t", 200, stream=stream)
    now[0] = 500.0
    sink.log(1, {})  # a first step that compiles things
    for step in range(2, 101):
        now[0] += 3.0
        sink.log(step, {})
    assert stream.getvalue().splitlines()[-1] == "step 100/200 left 5:00"


def test_a_step_costs_microseconds() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        environment = dict(os.environ)
        os.environ["TERM"] = "xterm"
        try:
            sink = ConsoleSink("t", 2000, stream=stream)
        finally:
            os.environ.clear()
            os.environ.update(environment)
        start = time.process_time()
        for step in range(1, 201):
            sink.log(step, METRICS)
        cost = (time.process_time() - start) / 200
        sink.close("finished")
    os.close(master)
    assert cost < 1e-3


def test_missing_and_bad_numbers() -> None:
    assert plain_line(1, 2, {}, None) == "step 1/2"
    assert plain_line(1, 2, {"critic/score/mean": float("nan")}, 61) == "step 1/2 reward nan left 1:01"
    assert sparkline((0.0, float("nan"), 1.0)) == "▁ █"
    assert sparkline((2.0, 2.0)) == "▁▁"
    assert sparkline(()) == ""


def test_the_sparkline_spans_the_whole_run() -> None:
    assert condensed([1.0, 2.0], 4) == [1.0, 2.0]
    assert condensed([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    thousand = condensed([float(i) for i in range(1001)], 48)
    assert len(thousand) == 48
    assert thousand == sorted(thousand)


def test_clock() -> None:
    assert [clock(s) for s in (0, 31.4, 59.6, 3659, 10859)] == ["0:00", "0:31", "1:00", "1:00:59", "3:00:59"]


def test_a_run_watched_from_elsewhere_has_its_own_times() -> None:
    stream = io.StringIO()
    sink = ConsoleSink("run", 4, stream=stream, began_ago=3700.0)
    sink.log(1, METRICS, ago=60.0)
    sink.log(2, METRICS)
    assert sink._seconds_left(sink._clock()) == pytest.approx(2 * (3700.0 / 2), abs=5.0)
    sink.log(3, METRICS)
    sink.close("watched")
    panel = io.StringIO()
    Console(file=panel, width=80).print(sink._render())
    assert "elapsed 1:01:40" in panel.getvalue()


def test_start_up_phases_are_lines_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with Startup(is_shown=True) as startup:
        startup.phase("importing")
        startup.phase("loading")
        startup.stop()
    assert capsys.readouterr().err == "importing\nloading\n"


def test_other_ranks_start_silently(capsys: pytest.CaptureFixture[str]) -> None:
    with Startup(is_shown=False) as startup:
        startup.phase("importing")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_phase_with_brackets_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(console_module, "_can_draw", lambda _: True)
    monkeypatch.setattr(console_module, "Console", lambda **_: Console(file=stream, force_terminal=True))
    with Startup(is_shown=True) as startup:
        startup.phase("loading models[/x]")
    assert "loading models[/x]" in stream.getvalue()


def test_the_first_frame_names_the_phase_and_shows_no_empty_numbers(monkeypatch):
    frames = []

    class Drawn:
        def __init__(self, get_renderable, **_):
            self._next = get_renderable

        def start(self, **_):
            console = Console(width=80, record=True, file=io.StringIO())
            console.print(self._next())
            frames.append(console.export_text())

        stop = start

    monkeypatch.setattr(console_module, "Live", Drawn)
    monkeypatch.setattr(console_module, "_can_draw", lambda _: True)
    sink = ConsoleSink("runs/r", 240, phase="loading the model\x1b[2J")
    assert "now loading the model\\x1b[2J" in frames[0]
    assert "–" not in frames[0]
    sink.log(1, METRICS)
    sink.close("watched")
    assert "0.410" in frames[1]
    assert "loading" not in frames[1]
