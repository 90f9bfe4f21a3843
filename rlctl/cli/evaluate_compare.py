"""`rlctl evaluate compare`: the difference between two evaluations, question by question."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.command import Out, PageFormat, PassAtK
from rlctl.errors import UsageError, visible

if TYPE_CHECKING:
    from rlctl.evaluate.compare import CompareReport
    from rlctl.terminal import Console

#: Characters of a question's or response's end in the terminal.
_SHOWN = 160


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Directory of an evaluation.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Directory of another one.")],
    k: PassAtK = None,
    output_format: PageFormat = "text",
    out: Out = None,
) -> None:
    """Compare two evaluations, question by question.

    Scores are paired by question, which detects much smaller differences than
    a comparison of two separate intervals.

      rlctl evaluate compare evaluations/before evaluations/after

      rlctl evaluate compare A B --format html --output compared.html
    """
    from rlctl.cli.output import check_out, write_report
    from rlctl.evaluate.compare import compare as run_comparison
    from rlctl.evaluate.compare import comparison_page

    check_out([a, b], out, is_page=output_format == "html")
    report = run_comparison(a, b, None if k is None else numbers(k))
    text = partial(_print, report)
    write_report(output_format, out, text, partial(asdict, report), html=partial(comparison_page, report))


def _print(report: CompareReport, console: Console) -> None:
    """Prints, per source, both scores, their difference with its interval, and the conclusion."""
    from rich.text import Text

    from rlctl.evaluate.compare import (
        DIFFERENCE_HEADINGS,
        difference_rows,
        flipped_counts,
        shared_questions,
    )
    from rlctl.text_table import print_table

    for name, place in (("A", report.a), ("B", report.b)):
        console.print(Text.assemble((f"{name}  ", "bold"), place), soft_wrap=True)
    for comparison in report.comparisons:
        amount = f": {shared_questions(comparison)}"
        console.print(Text.assemble("\n", (comparison.data_source, "bold"), amount), soft_wrap=True)
        if comparison.figures:
            rows = [(row.name, *row.cells) for row in difference_rows(comparison)]
            print_table(console, ("", *DIFFERENCE_HEADINGS), rows, right=range(1, 9), wide=True)
        console.print(Text(comparison.conclusion, style="bold"), soft_wrap=True)
    counts = flipped_counts(report)
    if counts:
        console.print(Text(f"\n{counts}", style="bold"))
    for question in report.flipped:
        console.print()
        for name, text in (
            ("question", question.question),
            ("expected", question.ground_truth),
            ("A, right" if question.right_in == "A" else "A, wrong", question.a_response),
            ("B, right" if question.right_in == "B" else "B, wrong", question.b_response),
        ):
            console.print(Text.assemble((f"  {name}  ", "dim"), _end(text)), soft_wrap=True)
    if report.warnings:
        console.print()
    for warning in report.warnings:
        console.print(Text(warning, style="yellow"), soft_wrap=True)


def _end(text: str) -> str:
    """The end of a text, on one line."""
    words = visible(" ".join(text.split()))
    return words if len(words) <= _SHOWN else f"…{words[-_SHOWN:]}"


def numbers(text: str) -> list[int]:
    """Parses the argument of `--k`, e.g. `1,4,8`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"not a list of numbers: {text}", where="--k", fix="for example --k 1,4,8") from None
