"""A sweep of runs by a stand-in for `rlctl train` that leaves what a run leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlctl.cli.sweep import _print as print_rows
from rlctl.errors import SpecError, UsageError
from rlctl.terminal import Console
from rlctl.train import sweep as sweeps
from rlctl.train.sweep import Sweep, SweepRow, open_sweep, plan, run_sweep, slurm_script, table

#: Four steps with a checkpoint after the second; the reward is seed + n · (0.1 + seed / 100).
STUB = """
import json, os, sys, time
from pathlib import Path
words = sys.argv[1:]
resumed = "--resume" in words
place = words[words.index("--resume") + 1] if resumed else words[-1].partition("=")[2]
run = Path(place)
run.mkdir(parents=True, exist_ok=True)
lock = run / ".lock.json"
lock.write_text(json.dumps({"pid": os.getpid(), "host": os.uname().nodename}))
if not resumed:
    (run / "spec.yaml").write_text(json.dumps({"words": words}))
values = dict(w.split("=", 1) for w in json.loads((run / "spec.yaml").read_text())["words"] if "=" in w)
seed, n = float(values["trainer.seed"]), float(values["rollout.n"])
log = run / "metrics.jsonl"
for step in range(3 if resumed else 1, 5):
    time.sleep(float(os.environ.get("STUB_S", "0")))
    with log.open("a") as file:
        file.write(json.dumps({"step": step, "critic/score/mean": seed + n * (0.1 + seed / 100)}) + chr(10))
    if step == 2:
        (run / "checkpoints/step_000002").mkdir(parents=True)
(run / "summary.json").write_text(json.dumps({"step": 4, "interrupted": False, "total_steps": 4}))
lock.unlink()
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "stub.py"
    file.write_text(STUB)
    monkeypatch.setattr(sweeps, "TRAIN", (sys.executable, str(file)))
    monkeypatch.setattr(sweeps, "_POLL_S", 0.02)
    return file


def steps(directory: Path, sweep: Sweep) -> list[list[int]]:
    logs = [directory / run.name / "metrics.jsonl" for run in sweep.runs]
    return [[json.loads(line)["step"] for line in log.read_text().splitlines()] for log in logs]


def test_values_of_axes() -> None:
    words = ["actor.lr=1e-6,3e-6", "trainer.seed=1..3", "rollout.n=4", "trainer.logger=[]"]
    sweep = plan(["rloo-seq-is"], words)
    assert sweep.axes == {"actor.lr": ["1e-6", "3e-6"], "trainer.seed": ["1", "2", "3"]}
    assert sweep.fixed == ["rollout.n=4", "trainer.logger=[]"]
    names = [run.name for run in sweep.runs]
    assert names[:4] == ["lr-1e-6_seed-1", "lr-1e-6_seed-2", "lr-1e-6_seed-3", "lr-3e-6_seed-1"]
    assert sweeps._values("[1,2],[3]") == ["[1,2]", "[3]"]
    assert sweeps._values("'a,b'") == ["'a,b'"]
    assert sweeps._values('"[",b') == ['"["', "b"]
    assert sweeps._values("3..1") == ["3", "2", "1"]
    with pytest.raises(UsageError, match="nothing is varied"):
        plan(["rloo-seq-is"], ["actor.lr=1e-6"])
    with pytest.raises(SpecError):  # before any run is started
        plan(["rloo-seq-is"], ["actor.lr=1e-6,-3"])


def test_different_values_have_different_directories() -> None:
    values = ["a/b", "a_b", "x" * 300 + "1", "x" * 300 + "2"]
    names = [sweeps.SweepRun({"data.train_files": value}).name for value in values]
    assert len(set(names)) == len(values)
    assert max(map(len, names)) < 200  # file systems allow 255


def test_every_run_once_and_the_table_pairs_by_seed(tmp_path: Path, stub: Path) -> None:
    directory = tmp_path / "s"
    sweep = open_sweep(directory, plan(["rloo-seq-is"], ["rollout.n=4,8", "trainer.seed=1..3"]))
    notes: list[str] = []
    assert run_sweep(directory, sweep, jobs=2, note=notes.append) == 0
    assert steps(directory, sweep) == [[1, 2, 3, 4]] * 6
    notes.clear()
    assert run_sweep(directory, open_sweep(directory), jobs=2, note=notes.append) == 0
    assert notes == []  # nothing is left to do
    first, second = table(directory, sweep)
    assert first.against_first is None
    assert first.value is not None
    assert first.value.value == pytest.approx(2 + 4 * 0.12)
    found = second.against_first  # differences 0.44, 0.48, 0.52: the seeds' own spread of 1 drops out
    assert found is not None
    assert found.value == pytest.approx(0.48)
    assert found.stderr == pytest.approx(0.04 / 3**0.5)
    assert second.paired_by == "seed"
    with pytest.raises(UsageError, match="a different sweep"):
        open_sweep(directory, plan(["rloo-seq-is"], ["rollout.n=4,16", "trainer.seed=1..3"]))


KILLED = """
import sys
from pathlib import Path
from rlctl.train import sweep as sweeps
sweeps.TRAIN, sweeps._POLL_S = (sys.executable, sys.argv[2]), 0.02
directory = Path(sys.argv[1])
sweeps.run_sweep(directory, sweeps.open_sweep(directory), jobs=2, note=lambda text: None)
"""


def test_a_setting_with_brackets_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(Console(), [SweepRow({"trainer.logger": "[console]"}, 1, 1, None, None, None)])
    assert "trainer.logger=[console]" in capsys.readouterr().out


@pytest.mark.parametrize("lines", [1, 3, 6])
def test_killed_at_some_moment_it_goes_on_and_loses_nothing(tmp_path: Path, stub: Path, lines: int) -> None:
    directory = tmp_path / "s"
    sweep = open_sweep(directory, plan(["rloo-seq-is"], ["rollout.n=4,8", "trainer.seed=1..2"]))
    command = [sys.executable, "-c", KILLED, str(directory), str(stub)]
    process = subprocess.Popen(command, env=os.environ | {"STUB_S": "0.1"})
    deadline = time.monotonic() + 300
    while sum(len(file.read_text().splitlines()) for file in directory.glob("*/metrics.jsonl")) < lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert run_sweep(directory, sweep, jobs=2, note=lambda _: None) == 0
    for logged in steps(directory, sweep):  # from the start, or from the checkpoint
        assert logged[-1] == 4
        assert set(logged) == {1, 2, 3, 4}
    assert all(row.num_done == 2 for row in table(directory, sweep))


def test_a_failed_run_is_counted_and_tried_again(tmp_path: Path, stub: Path) -> None:
    directory = tmp_path / "s"
    sweep = open_sweep(directory, plan(["rloo-seq-is"], ["rollout.n=4,8", "trainer.seed=7"]))
    stub.write_text("raise SystemExit(1)")
    assert run_sweep(directory, sweep, jobs=1, note=lambda _: None) == 2
    assert [row.num_done for row in table(directory, sweep)] == [0, 0]
    stub.write_text(STUB)
    assert run_sweep(directory, sweep, jobs=1, note=lambda _: None, only=1) == 0
    assert [row.num_done for row in table(directory, sweep)] == [0, 1]


WAITS = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print(1, flush=True); "
    "time.sleep(60)"
)


@pytest.mark.parametrize(("sent", "is_queued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_slurm_script_passes_the_end_on_and_is_queued_again_at_its_time_limit_alone(
    tmp_path: Path, sent: signal.Signals, is_queued: bool
) -> None:
    sweep = plan(["rloo-seq-is"], ["rollout.n=4,8", "trainer.seed=1..3"])
    script = slurm_script(tmp_path / "a sweep", sweep, jobs=2, options=["--gpus=1"])
    assert "#SBATCH --array=0-5%2" in script
    assert "#SBATCH --gpus=1" in script
    requeued, scontrol = tmp_path / "requeued", tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $2 > {requeued}\n")
    scontrol.chmod(0o755)
    command = next(line for line in script.splitlines() if line.endswith("&"))
    script = script.replace(command, f'{sys.executable} -c "{WAITS}" &')
    slurm = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_ARRAY_JOB_ID": "9",
        "SLURM_ARRAY_TASK_ID": "4",
    }
    process = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, env=os.environ | slurm)
    assert process.stdout
    process.stdout.readline()
    process.send_signal(sent)
    assert process.wait(60) == 143
    assert requeued.exists() == is_queued
    assert not is_queued or requeued.read_text().strip() == "9_4"
