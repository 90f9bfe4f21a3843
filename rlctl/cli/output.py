"""Output of commands: errors, tables, progress bars, standard output and files.

Imported inside functions, because it imports Rich.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from rlctl.cli.command import as_json, echo
from rlctl.errors import Problem, RlctlError, SpecError, UsageError, visible
from rlctl.files import write_text
from rlctl.terminal import Console
from rlctl.text_table import NO_LIMIT

_COLOURS = {"error": "bold red", "warning": "bold yellow"}


def print_error(error: RlctlError) -> None:
    """Prints what is wrong, where, and what to write instead."""
    console = Console(stderr=True)
    console.print(Text.assemble(("error: ", "bold red"), visible(error.what)), soft_wrap=True)
    if isinstance(error, SpecError):
        print_problems(error.problems, console)
    else:
        _print_details(console, error.where, error.fix)


def print_problems(problems: Iterable[Problem], console: Console | None = None) -> None:
    """Prints one paragraph per problem, errors first."""
    console = console or Console(stderr=True)
    for problem in sorted(problems, key=lambda problem: problem.severity):
        key = f"{problem.key}: " if problem.key else ""
        label = (f"{problem.severity}: ", _COLOURS[problem.severity])
        console.print(Text.assemble("  ", label, (key, "bold"), visible(problem.what)), soft_wrap=True)
        _print_details(console, problem.where, problem.fix, indent="      ")


def _print_details(console: Console, where: str | None, fix: str | None, indent: str = "  ") -> None:
    if where:
        console.print(Text(f"{indent}at   {visible(where)}", style="dim"), soft_wrap=True)
    if fix:
        console.print(Text(f"{indent}fix  {visible(fix)}", style="cyan"), soft_wrap=True)


def unwrapped(file: IO[str] | None = None) -> Console:
    """The console for reports on stdout or in `file`; only lines on a terminal are wrapped."""
    console = Console(highlight=False, file=file)
    if not console.is_terminal:
        console.width = NO_LIMIT
    return console


def print_indented(text: Text, indent: int, console: Console, head: Text | None = None) -> None:
    """Prints `head` and `text` on one line; wrapped lines of `text` align with its start."""
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_row(Text.assemble(" " * indent, head or ""), *filter(None, [text]))
    console.print(grid)


def print_labelled(console: Console, label: str, text: str, style: str = "", width: int = 13) -> None:
    """Prints a text beside its label; its other lines, wrapped ones too, begin below its first one."""
    lines = [
        part
        for line in visible(text).rstrip("\n").split("\n")
        for part in Text(line, style).wrap(console, console.width - width - 2) or [Text()]
    ]
    for number, line in enumerate(lines):
        head = "" if number else label
        console.print(Text.assemble((f"  {head:<{width}}", "dim"), line), soft_wrap=True)


@contextmanager
def counting(text: str, *columns: ProgressColumn) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error, on terminals only: description, bar, then `columns`.

    Yields the function that updates it: (done, total, description).
    """
    console = Console(stderr=True)
    shown = (TextColumn("{task.description}", markup=False), BarColumn())
    with Progress(*shown, *columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=None)

        def update(done: int, total: int, doing: str = text) -> None:
            bar.update(task, description=doing, completed=done, total=total)

        yield update


def write_report(
    output_format: str,
    out: Path | None,
    text: Callable[[Console], object],
    document: Callable[[], object],
    **others: Callable[[], str],
) -> None:
    """Writes a report to standard output or to the file.

    `text` prints it, `document` returns the content of its JSON, and `others` return it in other formats.
    """
    if output_format == "json":
        write_out(as_json(document()), out)
    elif output_format != "text":
        write_out(others[output_format](), out)
    elif out is None:
        text(unwrapped())
    else:
        file = io.StringIO()
        text(unwrapped(file))
        write_out(file.getvalue(), out)


def check_out(paths: Sequence[Path], out: Path | None, *, is_page: bool) -> None:
    """Refuses (UsageError) an output that would overwrite an input, or has no directory, or a shown page."""
    if out is None:
        if is_page and sys.stdout.isatty():
            raise UsageError(
                "a page cannot be shown on a terminal", where="--format html", fix="add --out FILE"
            )
        return
    if any(path.exists() and out.exists() and out.samefile(path) for path in paths):
        raise UsageError("this is an input of the command", where=f"--out {out}", fix="choose another name")
    if out.is_dir() or not out.parent.is_dir():
        message = "this is a directory" if out.is_dir() else "no such directory"
        raise UsageError(message, where=f"--out {out}", fix="name a file in a directory that exists")


def write_out(text: str, out: Path | None) -> None:
    """Writes the text to standard output, or as `write_file` to the file."""
    if out is None:
        echo(text, nl=False)
    else:
        write_file(out, text, where=f"--out {out}")


def write_file(path: Path, text: str, *, where: str = "", follow: bool = True) -> None:
    """Replace a file atomically (for a link, its target), or write to a device or pipe directly.

    `where` is the name of the file in errors; default: its path. Without `follow` a link itself is replaced:
    in a directory of someone else it may lead to a file of the user.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        if not follow:
            write_text(path, text)
        elif path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_text(path.resolve(), text)
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=where or str(path)) from error
