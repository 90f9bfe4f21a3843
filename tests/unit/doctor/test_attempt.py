"""A trial that crashes, hangs or returns invalid output is a result; it does not end `doctor`."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rlctl.doctor.examine import attempt

LIMIT_S = 60.0


def outcome_of(function: str, limit_s: float = LIMIT_S):
    return attempt(f"tests.unit.doctor.faults:{function}", limit_s)


def test_a_trial_that_works_says_so_and_knows_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    outcome = outcome_of("works")
    assert outcome.works
    assert outcome.found.startswith("ranks: None, hub offline: 1 (")


def test_an_error_of_ours_brings_its_fix() -> None:
    outcome = outcome_of("refuses")
    assert (outcome.works, outcome.found, outcome.fix) == (False, "no such operator", "install it")


def test_any_other_error_is_one_short_line() -> None:
    outcome = outcome_of("raises")
    assert not outcome.works
    assert outcome.found.startswith("fails: ZeroDivisionError: boom xxx")
    assert "\n" not in outcome.found
    assert len(outcome.found) < 400


def test_a_crash_is_named_with_its_last_words() -> None:
    outcome = outcome_of("segfaults")
    assert not outcome.works
    assert outcome.found == "crashes (SIGSEGV); last output: about to jump"


@pytest.mark.parametrize(("function", "words"), [("leaves", "crashes (exit code 7)"), ("no_such", "fails: ")])
def test_an_end_without_a_word(function: str, words: str) -> None:
    outcome = outcome_of(function)
    assert not outcome.works
    assert outcome.found.startswith(words)


def test_a_hang_ends_in_time_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("FAULTS_PIDS", str(pids))
    for limit_s in (5, 20, 80):  # a busy machine may not start an interpreter in the first limits
        outcome = outcome_of("hangs", limit_s)
        assert not outcome.works
        assert outcome.found.startswith(f"hangs: nothing after {limit_s} s")
        if pids.exists():
            break
    for pid in map(int, pids.read_text().split()):
        psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=60)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
