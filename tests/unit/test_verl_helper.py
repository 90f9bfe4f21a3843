"""Where verl is not installed, a skipped test says so and what to do."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.reference import verl_helper


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is in the project's own environment")
def test_a_missing_verl_is_a_reason_to_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl_helper, "SIDE", tmp_path / "verl")
    monkeypatch.setattr(verl_helper, "_imported", {})
    before = list(sys.path)
    assert verl_helper.load() is None
    assert "No module named 'verl'" in verl_helper.why_not()
    assert "make verl" in verl_helper.why_not()
    assert sys.path == before


def test_a_process_that_collects_tests_does_not_import_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest looks for marks at all names of a test module."""
    loaded: list[str] = []
    monkeypatch.setattr(verl_helper, "load", loaded.append)
    module = verl_helper.Lazy()
    assert not hasattr(module, "__wrapped__")
    assert getattr(module, "__pytest_wrapped__", None) is None
    assert not loaded
