"""`rlctl diagnose --selftest`: tests every rule on simulated logs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rlctl.diagnose.selftest import SelftestResult


def selftest(output_format: str, out: Path | None) -> None:
    """Run the self-test and write one line per rule and per kind of healthy run, as text or JSON.

    Raises:
        UsageError: another format, or `out` cannot be written.
        typer.Exit: with 1 if a rule misses its fault or a healthy run gets a warning.
    """
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    from rlctl.cli.output import check_out, counting, write_report
    from rlctl.diagnose.selftest import run_selftest, selftest_document, selftest_summary

    if output_format not in {"text", "json"}:
        raise UsageError("--selftest writes text or json", where=f"--format {output_format}")
    check_out((), out, is_page=False)
    with counting("logs", MofNCompleteColumn(), TimeElapsedColumn()) as count:
        results = run_selftest(count)

    def text(console: Console) -> None:
        console.print(_table(results))
        console.print(f"\n{selftest_summary(results)}")
        for one in results:
            if not one.passed:
                name = f"{one.rule or 'healthy run'}, {one.kind}, {one.framework}"
                console.print(f"{name}: expected {one.expected}, found {one.found}", markup=False)

    write_report(output_format, out, text, partial(selftest_document, results))
    if not all(one.passed for one in results):
        raise typer.Exit(1)


def _table(results: list[SelftestResult]) -> Table:
    """Passed and total number of logs, per rule (or kind of healthy run) and framework."""
    from rlctl.cli.output import plain_table
    from rlctl.diagnose.selftest import FRAMEWORKS

    table = plain_table(("rule, or kind of healthy run", *FRAMEWORKS), right=FRAMEWORKS)
    table.columns[0].no_wrap = True
    for name in dict.fromkeys(one.rule or one.kind for one in results):
        cells = []
        for framework in FRAMEWORKS:
            here = [one for one in results if (one.rule or one.kind) == name and one.framework == framework]
            passed, unable = sum(one.passed for one in here), {one.expected for one in here} == {"skipped"}
            text = "" if not here else "n/a" if unable else f"{passed}/{len(here)}"
            cells.append(text if passed == len(here) else f"[bold red]{passed}/{len(here)}[/]")
        table.add_row(name, *cells)
    return table
