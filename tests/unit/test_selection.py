"""Every entry of the table of kinds names a file and tests that exist, and CI runs both halves."""

from __future__ import annotations

import re
from pathlib import Path

from tests.selection import FILES, KINDS, LONGEST, is_thorough

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def test_entries_exist() -> None:
    for file, kept in FILES.items():
        functions = re.findall(r"^def (test_\w+)", (TESTS / file).read_text(), re.MULTILINE)
        assert set(kept) < set(functions), file


def test_the_longest_files_exist() -> None:
    assert [file for file in LONGEST if not (TESTS / file).is_file()] == []


def test_of_each_kind_one_test_stays() -> None:
    for kind, files in KINDS.items():
        assert any(files.values()), kind


def test_what_is_left_out() -> None:
    assert is_thorough("integration/test_llm.py", "test_the_run_is_evaluated")
    assert not is_thorough("integration/test_llm.py", "test_what_the_name_stands_for")
    assert not is_thorough("unit/test_selection.py", "test_entries_exist")


def test_ci_runs_both_halves() -> None:
    commands = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^make test$", commands, re.MULTILINE)
    assert re.search(r"^make test-all$", commands, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert '-m "not thorough"' in makefile
    assert "-m thorough" in makefile
