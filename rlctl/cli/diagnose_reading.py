"""Reading of logs with a progress bar, for the commands of `rlctl diagnose`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.progress import TaskProgressColumn, TimeElapsedColumn

from rlctl.cli.output import counting
from rlctl.diagnose.diagnosis_report import visible
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.table import RunLog


def read_runs(paths: Sequence[Path], wanted: frozenset[str]) -> list[RunLog]:
    """Reads the runs one by one, with a progress bar on standard error."""
    runs = []
    for path in paths:
        with counting(
            visible(f"reading {path.name or path}"), TaskProgressColumn(), TimeElapsedColumn()
        ) as count:
            runs.append(read_run(path, wanted, count))
    return runs
