"""How evaluations and their comparison look on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlctl.evaluate.compare import DIFFERENCE_HEADINGS, CompareReport, difference_rows, shared_questions
from rlctl.evaluate.evaluate_report import RESULTS_FILE, Evaluation, results_document
from rlctl.evaluate.page.tables import SCORE_HEADINGS, TableRow, score_rows
from rlctl.evaluate.page.write import PAGE_FILE
from rlctl.evaluate.samples import SAMPLES_FILE
from rlctl.tiny.task import DATA_SOURCE, WRITTEN


def print_evaluation(out: Path, evaluation: Evaluation) -> None:
    """Figures with intervals per source, what to know of them, and where they lie."""
    console = Console(highlight=False)
    model = evaluation.about["model"]
    of_run = f", step {model['step']} of {model['run_dir']}" if model["run_dir"] else ""
    console.print(Text(f"{model['path']}{of_run}"), soft_wrap=True)
    for score in results_document(evaluation)["scores"]:
        amount = f": {score['num_questions']:,} questions × {evaluation.n} responses"
        console.print(Text.assemble("\n", (score["data_source"], "bold"), amount), soft_wrap=True)
        _print_table(console, SCORE_HEADINGS, score_rows(score, evaluation.n))
    console.print()
    for note in _notes(evaluation):
        console.print(Text(note, style="yellow"), soft_wrap=True)
    console.print(Text(f"{out}/  {RESULTS_FILE}, {SAMPLES_FILE}, {PAGE_FILE}"), soft_wrap=True)


def print_comparison(report: CompareReport, console: Console) -> None:
    """Both figures, their difference with its interval, and the conclusion, per source."""
    for name, place in (("A", report.a), ("B", report.b)):
        console.print(Text.assemble((f"{name}  ", "bold"), place), soft_wrap=True)
    for comparison in report.comparisons:
        amount = f": {shared_questions(comparison)}"
        console.print(Text.assemble("\n", (comparison.data_source, "bold"), amount), soft_wrap=True)
        if comparison.figures:
            _print_table(console, DIFFERENCE_HEADINGS, difference_rows(comparison))
        console.print(Text(comparison.verdict, style="bold"), soft_wrap=True)
    if report.warnings:
        console.print()
    for warning in report.warnings:
        console.print(Text(warning, style="yellow"), soft_wrap=True)


def _print_table(console: Console, headings: Sequence[str], rows: Sequence[TableRow]) -> None:
    """Columns as wide as their longest text, whatever the terminal's width: no cell is wrapped or cut."""
    lines = [("", *headings), *((row.name, *row.cells) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for place, (name, *cells) in enumerate(lines):
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        text = "  ".join([f"{name:<{widths[0]}}", *padded]).rstrip()
        console.print(Text(text, style="" if place else "dim"), soft_wrap=True)


def _notes(evaluation: Evaluation) -> Iterator[str]:
    yield from evaluation.notes
    if any(score.data_source == DATA_SOURCE for score in evaluation.scores):
        yield WRITTEN
    if num_overlong := evaluation.about["data"]["num_overlong_prompts"]:
        yield f"{num_overlong} questions were left out: their prompts are too long"
    open_ones = [score for score in evaluation.scores if score.worst_case is not None]
    for score in open_ones:
        yield (
            f"{score.data_source}: {score.num_grader_errors:,} of {score.num_samples:,} responses could not "
            "be graded, more than reward.max_error_fraction "
            f"({evaluation.reward.max_error_fraction:g}). In the worst case all of these are wrong, in the "
            "best case right"
        )
    if evaluation.timeouts:
        kinds = ", ".join(f"{kind}: {count:,}" for kind, count in sorted(evaluation.timeouts.items()))
        count = sum(evaluation.timeouts.values())
        if count == 1:
            yield f"1 response ended its own grading ({kinds}); it is wrong"
        else:
            yield f"{count:,} responses ended their own grading ({kinds}); they are wrong"
    if (num_short := evaluation.scores[-1].num_short) and not open_ones:
        yield (
            f"{num_short:,} questions have fewer than {evaluation.n} graded samples: avg and maj take those "
            "there are, pass@k only questions with k"
        )
    if evaluation.grader_errors:
        first = evaluation.grader_errors[0].strip().splitlines()[-1]
        excluded = "" if open_ones else "samples the grader failed on are excluded, not scored 0; "
        yield f"{excluded}the grader's first failure: {first}"
    if evaluation.regraded:
        changed = evaluation.regraded
        yield (
            f"grades changed: {changed['num_changed']:,}; of these {changed['now_right']:,} are right now, "
            f"{changed['now_wrong']:,} wrong, {changed['now_failed']:,} fail, "
            f"{changed['no_longer_failed']:,} no longer fail"
        )
    elif evaluation.num_stored:
        yield f"{evaluation.num_stored:,} responses were stored already (--fresh samples them again)"
