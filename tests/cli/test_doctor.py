"""User-visible behaviour of `rlctl doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.doctor import examine
from rlctl.doctor.examine import EngineTrial


@pytest.fixture(autouse=True)
def _narrow_plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")


def faulty(function: str, *, module: str = "json", absent: str | None = None) -> EngineTrial:
    return EngineTrial(function, module, f"tests.unit.doctor.faults:{function}", 60, "repair it", absent)


def test_a_report_as_data_is_the_one_on_the_terminal(capsys, monkeypatch) -> None:
    trials = (faulty("works"), faulty("engine", module="no_such_engine", absent="pip install it"))
    monkeypatch.setattr(examine, "TRIALS", trials)
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["works"] is True
    by_name = {check["name"]: check for check in report["checks"]}
    assert by_name["engine"]["status"] == "note"  # an engine that is not installed does not fail the command
    assert by_name["works"]["status"] == "ok"
    assert run(["doctor", "--all"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in by_name)
    assert "pip install it" in shown


def test_without_a_problem_it_takes_ten_lines(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    works = (
        faulty("works")._replace(name=name) for name in ("torch", "Hugging Face generation", "DeepSpeed")
    )
    absent = faulty("engine", module="no_such_engine", absent="for rollout.name=it: pip install it")
    monkeypatch.setattr(examine, "TRIALS", (*works, absent))
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 10
    for line in ("torch, Hugging Face generation, DeepSpeed", "pip install it", "python 3", "Everything"):
        assert line in shown, line


def test_whatever_is_broken_has_a_cross_a_fix_and_exit_code_4(capsys, monkeypatch) -> None:
    monkeypatch.setattr(examine, "TRIALS", (faulty("segfaults"), faulty("refuses"), faulty("works")))
    assert run(["doctor"]) == 4
    lines = capsys.readouterr().out.splitlines()
    at = next(index for index, line in enumerate(lines) if "segfaults" in line)
    assert lines[at].split()[0] == "✗"
    assert "SIGSEGV" in lines[at]
    assert lines[at + 1].split() == ["fix", "repair", "it"]
    assert lines[at + 3].split() == ["fix", "install", "it"]  # the error's own
    assert any(line.split() == ["✓", "engines", "works"] for line in lines)  # the crash stopped nothing
    assert "2 of these" in lines[-1]


def test_quick_tries_nothing(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(examine, "attempt", lambda *_: pytest.fail("tried"))
    assert run(["doctor", "--quick", "--json"]) == 0
    groups = {check["group"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert groups == {"packages", "machine"}
    assert run(["doctor", "--quick"]) == 0
    assert "no engine was tried" in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.setenv("RLCTL_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()
    assert run(["doctor", "--quick"]) == 4
    assert "RLCTL_CACHE" in capsys.readouterr().out


def test_a_working_directory_that_was_deleted(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run(["doctor", "--quick"]) == 4
    assert "error: the working directory no longer exists" in capsys.readouterr().err


def test_a_trial_names_functions_that_exist() -> None:
    import importlib

    for trial in examine.TRIALS:
        module, _, function = trial.target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
