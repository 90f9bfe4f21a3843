"""Phases before the first step: lines in a log, nothing on ranks other than 0."""

from __future__ import annotations

import pytest

from rlctl.track.console import Startup


def test_lines_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with Startup(is_shown=True) as startup:
        startup.phase("importing")
        startup.phase("loading")
        startup.stop()
    assert capsys.readouterr().err == "importing\nloading\n"


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Startup(is_shown=False) as startup:
        startup.phase("importing")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
