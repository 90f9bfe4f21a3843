"""Reading of logs with a progress bar, for the commands of `rlctl diagnose`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.progress import TaskID, TaskProgressColumn, TimeElapsedColumn

from rlctl.cli.output import progress_bar
from rlctl.diagnose.diagnosis_report import visible
from rlctl.diagnose.readers.detect import read_run
from rlctl.diagnose.table import RunLog


@contextmanager
def reading(paths: Sequence[Path], wanted: frozenset[str]) -> Iterator[Iterator[RunLog]]:
    """Yields an iterator that reads the runs one by one, with a progress bar on standard error."""
    with progress_bar(TaskProgressColumn(), TimeElapsedColumn()) as bar:

        def advance(task: TaskID, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        def runs() -> Iterator[RunLog]:
            for path in paths:
                task = bar.add_task(visible(f"reading {path.name or path}"), total=None)
                yield read_run(path, wanted, partial(advance, task))
                bar.remove_task(task)

        yield runs()
