"""What the commands of `rlctl diagnose` share: reading logs with a progress bar, and writing output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from rlctl.errors import UsageError


class DiagnosisFormat(StrEnum):
    """How the diagnosis is written."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"


def check_out(paths: Sequence[Path], out: Path | None, *, is_page: bool) -> None:
    """Refuse an output that would overwrite a log, has no directory, or is a page on a terminal.

    Raises:
        UsageError: it is one of these.
    """
    import sys

    if out is None:
        if is_page and sys.stdout.isatty():
            raise UsageError(
                "a page cannot be shown on a terminal", where="--format html", fix="add --out FILE"
            )
        return
    if any(path.exists() and out.exists() and out.samefile(path) for path in paths):
        raise UsageError("this is the log itself", where=f"--out {out}", fix="choose another name")
    if out.is_dir() or not out.parent.is_dir():
        what = "this is a directory" if out.is_dir() else "no such directory"
        raise UsageError(what, where=f"--out {out}", fix="name a file in a directory that exists")


@contextmanager
def reading(paths: Sequence[Path], wanted: Any) -> Iterator[Iterator[Any]]:
    """The runs, read one after the other with a bar on standard error, on terminals only."""
    from functools import partial

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from rlctl.diagnose.diagnosis_report import visible
    from rlctl.diagnose.readers.detect import read_run

    console = Console(stderr=True)
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def advance(task: Any, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        def runs() -> Iterator[Any]:
            for path in paths:
                task = bar.add_task(visible(f"reading {path.name or path}"), total=None)
                yield read_run(path, wanted, partial(advance, task))
                bar.remove_task(task)

        yield runs()


def as_json(document: object) -> str:
    """For programs: text that any encoding can carry."""
    import json

    return json.dumps(document, indent=2, allow_nan=False) + "\n"


@contextmanager
def text_console(out: Path | None) -> Iterator[Any]:
    """A console on standard output, or one whose text goes into the file."""
    import io

    from rich.console import Console

    if out is None:
        yield Console(highlight=False)
        return
    text = io.StringIO()
    yield Console(highlight=False, file=text, width=120)
    write_out(text.getvalue(), out)


def write_out(text: str, out: Path | None) -> None:
    """To standard output, or in one go into the file.

    Raises:
        UsageError: the file cannot be written.
    """
    if out is None:
        typer.echo(text, nl=False)
        return
    from rlctl.files import write_text

    try:
        write_text(out, text)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=f"--out {out}") from error
