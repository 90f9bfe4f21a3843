"""The table of `make gpu`: measured and estimated values of each phase."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import card
from rlctl.metric_names import METRICS
from rlctl.run_spec.load import load_spec
from rlctl.run_spec.machine import MACHINES, machine_of


def test_each_phase_beside_its_estimate() -> None:
    measured = {"gen": 3.0, "old_log_prob": 1.0, "ref": 0.5, "update_actor": 6.0, "step": 12.0}
    estimated = {"generate": 2.0, "score": 3.0, "update": 2.5, "step": 0.5, "sync": 0.1, "whole step": 8.1}
    rows = card.compared(measured, estimated)
    assert rows == [
        ("generate, s", 3.0, 2.0),
        ("score, s", 1.5, 3.0),
        ("update and step, s", 6.0, 3.0),
        ("sync, s", None, 0.1),
        ("whole step, s", 12.0, 8.1),
    ]
    assert card.cells(rows[0]) == ["generate, s", "3", "2", "1.50"]
    assert card.cells(rows[3]) == ["sync, s", "–", "0.1", "–"]
    assert card.cells(("generate, s", 3.0, None))[-1] == "–"


def test_phases_are_those_of_the_run_and_of_the_plan(tmp_path: Path) -> None:
    names = set(METRICS)
    for ours, _ in card.PHASES.values():
        assert {f"timing_s/{phase}" for phase in ours} <= names
    card.write_model("tiny", tmp_path / "model")
    spec = load_spec([card.PRESET], [], card.overrides_of("tiny", "hf", tmp_path)).spec
    seconds, tokens, peak = card.estimate(spec, MACHINES["1xh100"])
    assert {phase for _, plans in card.PHASES.values() for phase in plans} == set(seconds)
    assert 0 < tokens < card.PROMPTS * card.SAMPLES * (16 + 12)
    assert 0 < peak < 80
    slower = card.estimate(spec, MACHINES["1x24gb"])[0]
    assert slower["whole step"] > seconds["whole step"]


@pytest.mark.slow
def test_it_measures_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, card.__file__, "--case", "tiny", "hf", "--steps", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=tmp_path)
    rows = {
        name: (measured, estimated) for name, measured, estimated in json.loads(done.stdout.splitlines()[-1])
    }
    for name in card.PHASES:
        measured, estimated = rows[name]
        assert measured > 0
        assert estimated > 0
    assert 0 < rows["correction, share of the step"][0] < 1


def test_a_case_that_fails_or_does_not_fit_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = iter(
        [
            subprocess.CompletedProcess([], 1, "traceback"),
            subprocess.CompletedProcess([], 0, '{"skipped": "needs 90 GiB by the estimate, GPU has 24"}'),
            subprocess.CompletedProcess([], 0, 'text\n[["generate, s", 1.0, 2.0]]'),
        ]
    )
    monkeypatch.setattr(card.subprocess, "run", lambda *_, **__: next(ended))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(sys, "argv", ["card.py", "--engines", "hf"])
    with pytest.raises(SystemExit, match="1 cases failed"):
        card.main()
    out = capsys.readouterr().out
    assert "| 0.5b | hf | failed with exit code 1 |" in out
    assert "| 1.5b | hf | skipped: needs 90 GiB" in out
    assert "| 7b | hf | generate, s | 1 | 2 | 0.50 |" in out


def test_a_case_is_skipped_by_the_memory_of_the_card() -> None:
    small, large = machine_of("1xl4"), machine_of("1xh200")
    assert "GiB by the estimate" in (card.too_large("7b", "vllm", small, []) or "")
    for size in ("tiny", "0.5b"):
        assert card.too_large(size, "hf", small, []) is None
    for size in card.SHAPES:
        assert card.too_large(size, "vllm", large, []) is None
    assert card.too_large("7b", "hf", replace(small, gpus=0), []) is None


def test_the_size_that_is_planned_is_that_of_the_model() -> None:
    assert card.planned_size("7b").num_parameters == pytest.approx(7_615_616_512, rel=1e-3)
    assert card.planned_size("0.5b").num_parameters == pytest.approx(494_032_768, rel=1e-2)
