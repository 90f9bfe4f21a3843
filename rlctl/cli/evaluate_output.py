"""Terminal output of evaluations and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlctl.evaluate.compare import DIFFERENCE_HEADINGS, CompareReport, difference_rows, shared_questions
from rlctl.evaluate.evaluate_report import RESULTS_FILE, Evaluation, results_document
from rlctl.evaluate.page.tables import SCORE_HEADINGS, TableRow, score_notes, score_rows
from rlctl.evaluate.page.write import PAGE_FILE
from rlctl.evaluate.samples import SAMPLES_FILE


def print_evaluation(out: Path, evaluation: Evaluation) -> None:
    """Prints scores with intervals per source, notes, and the directory of the results."""
    console = Console(highlight=False)
    model = evaluation.about["model"]
    of_run = f", step {model['step']} of {model['run_dir']}" if model["run_dir"] else ""
    console.print(Text(f"{model['path']}{of_run}"), soft_wrap=True)
    document = results_document(evaluation)
    for score in document["scores"]:
        amount = f": {score['num_questions']:,} questions × {evaluation.n} responses"
        console.print(Text.assemble("\n", (score["data_source"], "bold"), amount), soft_wrap=True)
        _print_table(console, SCORE_HEADINGS, score_rows(score, evaluation.n))
    console.print()
    for note in (*evaluation.notes, *score_notes(document)):
        console.print(Text(note, style="yellow"), soft_wrap=True)
    console.print(Text(f"{out}/  {RESULTS_FILE}, {SAMPLES_FILE}, {PAGE_FILE}"), soft_wrap=True)


def print_comparison(report: CompareReport, console: Console) -> None:
    """Prints, per source, both scores, their difference with its interval, and the conclusion."""
    for name, place in (("A", report.a), ("B", report.b)):
        console.print(Text.assemble((f"{name}  ", "bold"), place), soft_wrap=True)
    for comparison in report.comparisons:
        amount = f": {shared_questions(comparison)}"
        console.print(Text.assemble("\n", (comparison.data_source, "bold"), amount), soft_wrap=True)
        if comparison.figures:
            _print_table(console, DIFFERENCE_HEADINGS, difference_rows(comparison))
        console.print(Text(comparison.conclusion, style="bold"), soft_wrap=True)
    if report.warnings:
        console.print()
    for warning in report.warnings:
        console.print(Text(warning, style="yellow"), soft_wrap=True)


def _print_table(console: Console, headings: Sequence[str], rows: Sequence[TableRow]) -> None:
    """Prints columns as wide as their longest text; cells are never wrapped or cut to fit the terminal."""
    lines = [("", *headings), *((row.name, *row.cells) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for place, (name, *cells) in enumerate(lines):
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        text = "  ".join([f"{name:<{widths[0]}}", *padded]).rstrip()
        console.print(Text(text, style="" if place else "dim"), soft_wrap=True)
