"""States of runs, from directories as runs leave them; the commands that show them."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rlctl.cli.app import run
from rlctl.cli.command import run_or_model
from rlctl.errors import UsageError
from rlctl.evaluate.request import find_target
from rlctl.track.open_run import chosen_step, find_runs, open_run, read_state, run_named
from rlctl.track.run_dir import note_in_environment, open_run_dir
from tests.dumps import conversation, dumped, write

Row = dict[str, Any]


def write_run(path: Path, rows: list[Row], *, summary: Row | None = None, failure: Row | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "spec.yaml").write_text(
        "model: {path: org/name}\ntrainer: {experiment_name: mine, total_training_steps: 9}\n"
    )
    command = ["rlctl", "train", "-p", "8gpu", "--preset=rloo-seq-is", "--preset", "x"]
    (path / "environment.json").write_text(
        json.dumps({"time": f"2026-01-01T00:00:0{len(rows)}", "command": command})
    )
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, content in (("summary", summary), ("failure", failure)):
        if content is not None:
            (path / f"{name}.json").write_text(json.dumps(content))
    return path


ROWS: list[Row] = [
    {"step": 0, "val/gsm8k/reward_mean": 0.1},
    {"step": 1, "critic/score/mean": 0.2, "val/gsm8k/reward_mean": 0.3},
    {"step": 2, "critic/score/mean": "NaN"},
    {"step": 3, "critic/score/mean": 0.5},
]
DONE = {"step": 3, "total_steps": 3, "interrupted": False}


def test_states(tmp_path: Path) -> None:
    cases: dict[str, tuple[list[Row], Row | None, Row | None]] = {
        "finished": (ROWS, DONE, None),
        "interrupted": (ROWS, DONE | {"interrupted": True, "total_steps": 9}, None),
        "stopped": (ROWS, DONE | {"interrupted": True, "guardrails": {"stopped_because": "kl"}}, None),
        "failed": (ROWS, None, {"what": "no room", "where": None, "fix": None}),
        "died": (ROWS, None, None),
        "died-resumed": (ROWS, DONE | {"step": 2}, None),  # the summary is of an earlier part of the run
        "empty": ([], None, None),
    }
    for name, (rows, summary, failure) in cases.items():
        write_run(tmp_path / name, rows, summary=summary, failure=failure)
    states = {each.path.name: each for each in find_runs(tmp_path)}
    assert {name: each.state for name, each in states.items()} == {
        name: name.partition("-")[0] for name in cases
    }
    assert (states["failed"].reason, states["stopped"].reason, states["died"].reason) == (
        "no room",
        "kl",
        None,
    )
    done = states["finished"]
    assert (done.preset, done.model, done.step, done.total_steps) == ("rloo-seq-is+8gpu+x", "org/name", 3, 3)
    assert (done.reward, dict(done.validation)) == (0.5, {"gsm8k": 0.3})
    assert states["died"].total_steps == 9


def test_the_total_is_that_of_the_last_start(tmp_path: Path) -> None:
    """A run by epochs knows its number of steps before its end; a resumed run may have another one."""
    path = write_run(tmp_path / "a", ROWS, summary=DONE)
    note_in_environment(path, total_steps=12)
    assert read_state(path).total_steps == 12


def test_a_cut_last_line_and_damaged_files_hide_no_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", ROWS)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "critic/sco')
    for name in ("summary.json", "environment.json", "failure.json"):
        (path / name).write_text("{")
    found = read_state(path)
    assert (found.step, found.state, found.preset, found.started) == (3, "died", "mine", None)


@pytest.mark.parametrize("line", ["[1]", "5", '{"a": 1.0}', '{"step": "x"}', '{"step": 1.5}', "\0\0"])
def test_a_line_that_is_no_step_is_passed_over_or_named(tmp_path: Path, line: str) -> None:
    path = write_run(tmp_path / "a", ROWS)
    metrics = path / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(f"{text}{line}\n")
    assert [each.step for each in find_runs(tmp_path)] == [3]
    assert open_run(path).metrics()["step"].to_pylist() == [0, 1, 2, 3]
    metrics.write_text(f"{line}\n{text}")
    with pytest.raises(UsageError, match=r"metrics\.jsonl:1"):
        open_run(path).metrics()


def test_a_run_below_a_run_is_not_searched_for(tmp_path: Path) -> None:
    write_run(tmp_path / "p" / "a", ROWS, summary=DONE)
    write_run(tmp_path / "p" / "a" / "checkpoints" / "x", ROWS)
    assert [each.path.name for each in find_runs(tmp_path)] == ["a"]
    assert [each.path.name for each in find_runs(tmp_path / "p" / "a")] == ["a"]


HOLD = """
import sys, time
from pathlib import Path
from rlctl.track.run_dir import note_in_environment, open_run_dir
from tests.dumps import conversation, dumped, write
with open_run_dir(Path(sys.argv[1]), resume=True):
    print("held", flush=True)
    time.sleep(600)
"""


def test_running_until_the_process_is_killed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", ROWS, failure={"what": "an earlier one"})
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert read_state(path).state == "running"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (path / ".lock.json").exists()
    assert read_state(path).state == "died"
    with open_run_dir(path, resume=True):
        assert read_state(path).state == "running"
    assert read_state(path).state == "died"


def test_the_number_of_a_dead_process_given_to_another_is_not_the_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", ROWS)
    holder = path / ".lock.json"
    holder.write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}))
    assert read_state(path).state == "running"
    long_ago = time.time() - 10**6
    os.utime(holder, (long_ago, long_ago))
    assert read_state(path).state == "died"
    holder.write_text(json.dumps({"pid": 1, "host": "another-host"}))
    assert read_state(path).state == "running"


def test_a_failure_is_kept_and_the_next_start_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with open_run_dir(path, resume=False) as opened:
        opened.write_failure(UsageError("no such key", where="f:3", fix="write x"))
    assert json.loads((path / "failure.json").read_text()) == {
        "what": "no such key",
        "where": "f:3",
        "fix": "write x",
    }
    with open_run_dir(path, resume=True) as opened:
        assert not (path / "failure.json").exists()
        opened.write_failure(ZeroDivisionError("boom"))
    assert "ZeroDivisionError: boom" in (path / "failure.json").read_text()


def test_runs_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "p" / "a", ROWS, summary=DONE)
    write_run(tmp_path / "p" / "b", ROWS[:2], failure={"what": "no room"})
    assert run(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = (str(tmp_path / "p" / name) for name in "ab")
    words = "1/9 failed 0.200 rloo-seq-is+8gpu+x; org/name; gsm8k 0.300"
    assert lines[1].split() == [second, *words.split()]
    assert lines[2].split()[:4] == [first, "3/3", "finished", "0.500"]
    assert lines[3] == f"{second} failed: no room"
    assert run(["runs", str(tmp_path), "-n", "1"]) == 0
    assert second not in capsys.readouterr().out
    assert run(["runs", str(tmp_path), "--json"]) == 0
    assert [each["state"] for each in json.loads(capsys.readouterr().out)] == ["failed", "finished"]
    assert run(["runs", str(tmp_path / "gone")]) == 2
    assert run(["runs", str(tmp_path / "p" / "a" / "none")]) == 2


@pytest.mark.parametrize("columns", [80, 120])
def test_a_listed_name_can_be_pasted(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal too, where the other columns are wrapped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("TERM", "dumb")
    names = ["qwen2.5-7b-grpo-multi-rs-20260101-120000", "grpo-20260101-120001", "grpo-20260101-120002"]
    for name in names:
        write_run(tmp_path / "runs" / "rlctl" / name, ROWS, summary=DONE)
    write_run(tmp_path / "runs" / "other" / names[2], ROWS, summary=DONE)
    assert run(["runs"]) == 0
    names_shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    shown = names_shown[1:]  # below the heading
    assert sorted(shown) == sorted([*names[:2], f"runs/other/{names[2]}", f"runs/rlctl/{names[2]}"])
    for name in [*shown, "multi", "120001", f"rlctl/{names[2]}"]:
        assert run(["watch", name, "--plain"]) == 0
    assert run(["diagnose", "120001"]) == 0
    assert run(["watch", names[2], "--plain"]) == 2
    assert f"2 runs have this in their names: runs/other/{names[2]}, " in capsys.readouterr().err
    assert run(["watch", "none", "--plain"]) == 2
    write_run(tmp_path / "runs" / "rlctl" / "grpo", ROWS, summary=DONE)
    assert run(["watch", "grpo", "--plain"]) == 0
    assert run_or_model(names[1]) == f"runs/rlctl/{names[1]}"
    assert run_or_model("120001") == "120001"  # a hub id may be part of a run's name
    assert run_named("-", tmp_path) == Path("-")


def test_brackets_and_escapes_in_names_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"step": 1, "val/[/b] \x1b[31mx/reward_mean": 0.5}]
    write_run(tmp_path / "a[red]b", rows, summary=DONE | {"step": 1})
    assert run(["runs", str(tmp_path)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith(f"{tmp_path}/a[red]b ")
    assert r"[/b] \x1b[31mx 0.500" in line


def test_watch_shows_what_is_logged_until_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "a", ROWS, summary=DONE)
    assert run(["watch", str(path), "--plain"]) == 0
    out = capsys.readouterr().out
    assert "step 3/3 reward 0.50" in out
    assert out.endswith("finished after step 3\n")
    assert run(["watch", str(tmp_path)]) == 2
    spec = (path / "spec.yaml").read_text()
    (path / "spec.yaml").write_text(spec.replace("total_training_steps: 9", "total_training_steps: null"))
    (path / "summary.json").unlink()
    assert run(["watch", str(path), "--plain"]) == 0
    assert "step 3/? reward 0.50\n" in capsys.readouterr().out


def test_samples_show_the_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "a", ROWS, summary=DONE)
    with pytest.raises(UsageError, match="saved no rollouts"):
        open_run(path).rollout_steps()

    def row(step: int, response: str, reward: float | None, *gaps: float) -> Row:
        count, texts = len(gaps), {"data_source": "t", "prompt": "1+1=", "ground_truth": "2"}
        trained, given = [-1.0 + gap for gap in gaps], {"response": response, "reward": reward} | texts
        return dumped([1] * count, [-1.0] * count, trained, prompt_ids=[5, 6], step=step, **given)

    rows = [row(1, "old", 1.0, 0.5), row(2, "a", 1.0, 0.25, -0.25), row(2, "b\x1b[31m", None, -0.5, -0.25)]
    write(path / "rollouts" / "rollouts-1-2.parquet", rows)
    assert run(["samples", str(path), "--sort", "gap"]) == 0
    out = capsys.readouterr().out
    assert "old" not in out
    assert "\x1b" not in out
    assert out.index("b\\x1b[31m") < out.index("response     a")
    assert "reward ungraded  2 tokens  log ρ -0.7500 (largest token 0.5000)" in out
    assert run(["samples", str(path), "-s", "2", "--sort", "reward", "-n", "1", "--json"]) == 0
    assert [(each["response"], each["log_ratio"]) for each in json.loads(capsys.readouterr().out)] == [
        ("a", 0.0)
    ]
    rows = [row(3, "diverged", float("nan"), float("inf"))]
    write(path / "rollouts" / "rollouts-3-3.parquet", rows)
    assert run(["samples", str(path), "--json"]) == 0
    (each,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (each["reward"], each["log_ratio"]) == ("NaN", "Infinity")
    assert run(["samples", str(path), "-s", "7"]) == 2
    assert "kept: steps 1 to 3" in capsys.readouterr().err
    assert run(["samples", str(path), "--sort", "up"]) == 2


def test_samples_show_each_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "a", ROWS, summary=DONE)
    write(
        path / "rollouts" / "rollouts-1-1.parquet", [conversation(response="as graders read it", sequence=1)]
    )
    assert run(["samples", str(path)]) == 0
    out = capsys.readouterr().out
    assert "response     as graders read it" in out  # no tokenizer is known
    assert "reward 1  3 tokens in 2 turns, sequence 2  log ρ -1.5000" in out
    model = path / "checkpoints/step_000001/model"
    model.mkdir(parents=True)
    vocabulary = {chr(ord("a") + number): number for number in range(10)}
    Tokenizer(WordLevel(vocabulary, unk_token="a")).save(str(model / "tokenizer.json"))
    assert run(["samples", str(path)]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert shown[1:4] == [["turn", "1", "f", "g"], ["observation", "h"], ["turn", "2", "i"]]
    assert run(["samples", str(path), "--json"]) == 0
    (each,) = json.loads(capsys.readouterr().out)
    assert each["turns"] == [
        {"turn": 1, "text": "f g"}, {"turn": None, "text": "h"}, {"turn": 2, "text": "i"},
    ]  # fmt: skip


def test_a_step_is_a_number_or_the_best_validated_one(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("model: {path: embedded}\n")
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1, "critic/score/mean": 0.9}\n')
    assert [chosen_step(tmp_path, step) for step in (None, 3, "4")] == [None, 3, 4]
    for wrong in ("last", "-1", "1.5"):
        with pytest.raises(UsageError, match="or best"):
            chosen_step(tmp_path, wrong)
    with pytest.raises(UsageError, match="no validation"):
        chosen_step(tmp_path, "best")
    rewards = {0: 0.9, 2: 0.4, 4: 0.6, 6: 0.6, 8: 0.5}  # the weights of step 0 are in no checkpoint
    log.write_text("".join(f'{{"step": {s}, "val/x/reward_mean": {r}}}\n' for s, r in rewards.items()))
    assert chosen_step(tmp_path, "best") == 4
    with pytest.raises(UsageError, match="no run"):
        find_target("org/model", ["data.parquet"], "best")
