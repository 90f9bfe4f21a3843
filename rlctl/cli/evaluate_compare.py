"""`rlctl evaluate compare` and `rlctl evaluate list`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlctl.cli.command import AsJson, Out, print_json
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from rlctl.evaluate.compare import CompareReport


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Directory of an evaluation.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Directory of another one.")],
    k: Annotated[
        str | None,
        typer.Option(
            "--k", metavar="K,…", help="The k of pass@k.", show_default="1,4,8, up to the smaller n"
        ),
    ] = None,
    output_format: Annotated[
        Literal["text", "json", "html"],
        typer.Option("--format", help="Text, JSON, or a self-contained HTML page."),
    ] = "text",
    is_json: AsJson = False,
    out: Out = None,
) -> None:
    """Compare two evaluations, question by question.

    Scores are paired by question, which detects much smaller differences than
    a comparison of two separate intervals.

      rlctl evaluate compare evaluations/before evaluations/after

      rlctl evaluate compare A B --format html --out compared.html
    """
    from rlctl.cli.output import check_out, write_report
    from rlctl.evaluate.compare import compare as run_comparison
    from rlctl.evaluate.compare import comparison_page

    output_format = "json" if is_json else output_format
    check_out([a, b], out, is_page=output_format == "html")
    report = run_comparison(a, b, None if k is None else numbers(k))
    text = partial(_print, report)
    write_report(output_format, out, text, partial(asdict, report), html=partial(comparison_page, report))


def _print(report: CompareReport, console: Console) -> None:
    """Prints, per source, both scores, their difference with its interval, and the conclusion."""
    from rich.text import Text

    from rlctl.cli.output import print_wide_table
    from rlctl.evaluate.compare import DIFFERENCE_HEADINGS, difference_rows, shared_questions

    for name, place in (("A", report.a), ("B", report.b)):
        console.print(Text.assemble((f"{name}  ", "bold"), place), soft_wrap=True)
    for comparison in report.comparisons:
        amount = f": {shared_questions(comparison)}"
        console.print(Text.assemble("\n", (comparison.data_source, "bold"), amount), soft_wrap=True)
        if comparison.figures:
            rows = [(row.name, *row.cells) for row in difference_rows(comparison)]
            print_wide_table(console, ("", *DIFFERENCE_HEADINGS), rows)
        console.print(Text(comparison.conclusion, style="bold"), soft_wrap=True)
    if report.warnings:
        console.print()
    for warning in report.warnings:
        console.print(Text(warning, style="yellow"), soft_wrap=True)


def numbers(text: str) -> list[int]:
    """Parses the argument of `--k`, e.g. `1,4,8`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"not a list of numbers: {text}", where="--k", fix="for example --k 1,4,8") from None


def list_benchmarks(is_json: AsJson = False) -> None:
    """List the benchmarks: questions, source, revision, prompt and grader, all pinned.

    rlctl evaluate list

    rlctl evaluate list --json
    """
    from rlctl.data.benchmarks import BENCHMARKS

    if is_json:
        print_json([asdict(each) for each in BENCHMARKS.values()])
        return
    for each in BENCHMARKS.values():
        choices = "its choices, " if each.recipe == "multiple-choice" else ""
        lines = {
            "questions": f"{each.num_questions:,} ({each.split} split)",
            "source": f"{each.dataset}, {each.file}",
            "revision": each.revision,
            "prompt": f"the question, {choices}then: {each.instruction}",
            "grader": each.grader,
        }
        typer.secho(each.name, bold=True)
        typer.echo("\n".join(f"  {name:<10} {text}" for name, text in lines.items()))
