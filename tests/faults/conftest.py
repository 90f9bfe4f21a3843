"""One line at the end: how many faults the suite survived."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
_outcomes: dict[str, bool] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped or HERE.name not in Path(report.nodeid.split("::")[0]).parts:
        return
    _outcomes[report.nodeid] = _outcomes.get(report.nodeid, True) and report.passed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _outcomes:
        survived = sum(_outcomes.values())
        terminalreporter.write_line(f"{survived} of {len(_outcomes)} faults survived")
