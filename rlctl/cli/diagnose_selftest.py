"""`rlctl diagnose --selftest`: every rule on simulated logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from rlctl.cli.diagnose_output import DiagnosisFormat
    from rlctl.diagnose.selftest import SelftestResult


def selftest(output_format: DiagnosisFormat, out: Path | None) -> None:
    """Run the self-test and write one line per rule and per kind of healthy run.

    Args:
        output_format: text or JSON.
        out: a file; None: standard output.

    Raises:
        UsageError: another format, or `out` cannot be written.
        typer.Exit: with 1 if a rule misses its fault or a healthy run gets a warning.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from rlctl.cli.diagnose_output import DiagnosisFormat, as_json, check_out, text_console, write_out
    from rlctl.diagnose.selftest import run_selftest, selftest_document, selftest_summary

    if output_format not in {DiagnosisFormat.TEXT, DiagnosisFormat.JSON}:
        raise UsageError("--selftest writes text or json", where=f"--format {output_format.value}")
    check_out((), out, is_page=False)
    error = Console(stderr=True)
    columns = ("logs", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=error, transient=True, disable=not error.is_terminal) as bar:
        task = bar.add_task("", total=None)
        results = run_selftest(lambda done, total: bar.update(task, completed=done, total=total))
    if output_format is DiagnosisFormat.JSON:
        write_out(as_json(selftest_document(results)), out)
    else:
        with text_console(out) as console:
            console.print(_table(results))
            console.print(f"\n{selftest_summary(results)}")
            for one in results:
                if not one.passed:
                    name = f"{one.rule or 'healthy run'}, {one.kind}, {one.framework}"
                    console.print(f"{name}: expected {one.expected}, found {one.found}", markup=False)
    if not all(one.passed for one in results):
        raise typer.Exit(1)


def _table(results: list[SelftestResult]) -> Table:
    """Logs that passed of all logs, per rule or kind of healthy run, and framework."""
    from rich.table import Table

    from rlctl.diagnose.selftest import FRAMEWORKS

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rule, or kind of healthy run", no_wrap=True)
    for framework in FRAMEWORKS:
        table.add_column(framework, justify="right")
    for name in dict.fromkeys(one.rule or one.kind for one in results):
        cells = []
        for framework in FRAMEWORKS:
            here = [one for one in results if (one.rule or one.kind) == name and one.framework == framework]
            passed, unable = sum(one.passed for one in here), {one.expected for one in here} == {"skipped"}
            text = "" if not here else "n/a" if unable else f"{passed}/{len(here)}"
            cells.append(text if passed == len(here) else f"[bold red]{passed}/{len(here)}[/]")
        table.add_row(name, *cells)
    return table
