"""Shows the start-up phases of a run: a spinner with the elapsed time, or lines in a log."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def wants_plain_lines() -> bool:
    """Whether `RLCTL_PLAIN` requests plain lines on a terminal too."""
    return os.environ.get("RLCTL_PLAIN", "0") not in {"", "0"}


class Startup:
    """Shows one phase after another on stderr; a context manager that clears the spinner.

    Args:
        is_shown: False on ranks other than 0.
        also: called with every phase, on every rank.
    """

    def __init__(self, *, is_shown: bool, also: Callable[[str], None] = lambda _: None) -> None:
        self._is_shown, self._also = is_shown, also
        console = Console(stderr=True)
        self._progress: Progress | None = None
        if is_shown and console.is_interactive and sys.stderr.isatty() and not wants_plain_lines():
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task("")

    def phase(self, text: str) -> None:
        """Shows the start of a phase."""
        self._also(text)
        if self._progress:
            self._progress.update(self._task, description=text)
            self._progress.start()
        elif self._is_shown:
            sys.stderr.write(f"{text}\n")

    def stop(self) -> None:
        """Clears the spinner; can be called twice."""
        if self._progress:
            self._progress.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
