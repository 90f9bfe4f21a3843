"""`rlctl diagnose --selftest`: does every rule find its fault, and do healthy runs stay quiet?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.cli.diagnose import Format
    from rlctl.diagnose.selftest.matrix import Matrix

_SEEDS = 2


def selftest(output_format: Format, out: Path | None) -> None:
    """Try all rules on simulated logs, and write the detection matrix.

    Args:
        output_format: text or JSON.
        out: a file; None: standard output.

    Raises:
        UsageError: there is no such format, or `out` cannot be written.
        typer.Exit: with 1 if a rule misses its fault or a healthy run raises an alarm.
    """
    from rlctl.cli.diagnose import Format, as_json, check_out, text_console, write_out

    if output_format not in {Format.TEXT, Format.JSON}:
        raise UsageError("--selftest writes text or json", where=f"--format {output_format.value}")
    check_out((), out, is_page=False)
    matrix = _run()
    if output_format is Format.JSON:
        write_out(as_json(matrix.as_document()), out)
    else:
        with text_console(out) as console:
            console.print(matrix.table())
            console.print(
                f"\n{matrix.summary()}\n"
                "n/a: that framework's log cannot show it, and the rule says what it lacks; "
                "delay: steps until it is said, median … longest"
            )
            for trial in matrix.failures:
                where = f"{trial.rule or 'healthy run'}, {trial.kind}, {trial.form}, seed {trial.seed}"
                console.print(f"{where}: wanted {trial.wanted}, {trial.problem}", markup=False)
    if matrix.failures:
        raise typer.Exit(1)


def _run() -> Matrix:
    """With a bar on standard error, on terminals only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from rlctl.diagnose.selftest.matrix import run

    console = Console(stderr=True)
    columns = ("logs", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        return run(_SEEDS, lambda done, total: bar.update(task, completed=done, total=total))
