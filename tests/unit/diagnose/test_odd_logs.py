"""Logs with duplicated, broken or missing lines, and those of another kind of training: read, or said."""

import json

import numpy as np
import pytest

from rlctl.cli.app import run as rlctl
from rlctl.diagnose.thresholds import SCORE
from tests.unit.diagnose.test_rules_judged import advice, diagnosis_of, found
from tests.unit.diagnose.test_rules_policy import of_text

VERL = "".join(f"step:{step} - actor/grad_norm:0.{step} - critic/score/mean:0.4\n" for step in range(1, 8))
BEST, WORST, CUT = "critic/score/max", "critic/score/min", "response_length/clip_ratio"


def rows(steps, **more):
    lines = ({"step": step, "actor/grad_norm": 0.1 * index} | more for index, step in enumerate(steps, 1))
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_two_processes_in_one_file_are_said(tmp_path):
    text = "".join(rows([step]) + rows([step], **{"actor/grad_norm": 9.0}) for step in range(1, 9))
    run = of_text(tmp_path, text).run
    assert any("8 steps are logged twice with other values" in note for note in run.notes)
    twice = "".join(rows([step]) * 2 for step in range(1, 9))
    assert not of_text(tmp_path, twice).run.notes  # the same row again


def test_steps_that_are_no_whole_numbers_are_read_and_said(tmp_path):
    run = of_text(tmp_path, rows([step + 0.5 for step in range(1, 9)])).run
    assert run.table.steps.tolist() == list(range(1, 9))
    assert any("no whole numbers" in note for note in run.notes)


ASSERT = (
    '../IndexKernel.cu:92: operator(): block: [17,0,0] Assertion `index < sizes[i] && "bounds"` failed.\n'
)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/a/trainer.py", line 338, in fit\n    loss.backward()\n'
)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (ASSERT * 3, "Assertion"),
        (TRACEBACK, "an exception whose last line is not in the log"),
        (TRACEBACK + "ValueError: bad\n", "ValueError: bad"),
    ],
)
def test_a_crash_without_its_last_line_is_an_end(tmp_path, end, words):
    first = of_text(tmp_path, VERL + end).findings[0]
    assert (first.rule, first.severity) == ("exception", "critical")
    assert words in first.what
    assert first.fixes
    assert not found(of_text(tmp_path, VERL + end + VERL.replace("step:", "step:1"))).get("exception")


def sft(more=""):
    return "".join(f'{{"step": {s}, "loss": {2 - s / 99}, "grad_norm": 1.0{more}}}\n' for s in range(1, 41))


def test_a_log_of_supervised_fine_tuning_is_named(tmp_path, capsys):
    diagnosis = of_text(tmp_path, sft())
    assert diagnosis.status == "insufficient data"
    assert rlctl(["diagnose", str(tmp_path / "run.log")]) == 0
    assert "supervised fine-tuning" in capsys.readouterr().out.splitlines()[0]
    assert of_text(tmp_path, sft(', "reward": 0.4')).status != "insufficient data"


def test_a_fault_of_an_earlier_phase_of_a_run_that_learned_is_over():
    columns = {BEST: [1.0] * 120, WORST: [0.0] * 120, CUT: [0.6] * 25 + [0.01] * 95}
    learned = diagnosis_of(first=1, **columns, **{SCORE: list(np.linspace(0.1, 0.95, 120))})
    finding = found(learned)["truncated"]
    assert (finding.severity, finding.fixes) == ("info", ())
    assert finding.what.startswith("was: ")
    flat = found(diagnosis_of(first=1, **columns, **{SCORE: [0.1] * 120}))["truncated"]
    assert flat.severity == "critical"
    still = diagnosis_of(first=1, **columns | {CUT: [0.6] * 120, SCORE: list(np.linspace(0.1, 0.95, 120))})
    assert found(still)["truncated"].severity == "critical"


def test_zero_advantages_with_a_critic_say_nothing_of_groups(tmp_path):
    line = (
        "step:{step} - critic/vf_loss:0.1 - actor/grad_norm:0.2 - critic/score/mean:0.4 - "
        "critic/score/max:1.0 - critic/score/min:0.0 - critic/advantages/max:0.0 - "
        "critic/advantages/min:0.0\n"
    )
    text = "".join(line.format(step=step) for step in range(1, 30))
    finding = found(of_text(tmp_path, text))["zero-advantages"]
    assert "group" not in f"{finding.cause} {advice(finding)}"
