"""How the figures of evaluations look on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlctl.evaluate.evaluate_report import RESULTS_FILE
from rlctl.evaluate.page.write import PAGE_FILE
from rlctl.evaluate.samples import SAMPLES_FILE

if TYPE_CHECKING:
    from rlctl.evaluate.compare import CompareReport, Comparison, Figure
    from rlctl.evaluate.evaluate_report import Evaluation
    from rlctl.evaluate.intervals import IntervalFigure
    from rlctl.evaluate.scores import Score


def print_evaluation(out: Path, evaluation: Evaluation) -> None:
    """Figures with intervals per source, what to know of them, and where they lie."""
    console = Console(highlight=False)
    model = evaluation.about["model"]
    of_run = f", step {model['step']} of {model['run_dir']}" if model["run_dir"] else ""
    console.print(Text(f"{model['path']}{of_run}"), soft_wrap=True)
    for score in evaluation.scores:
        amount = f": {score.num_questions:,} questions × {evaluation.n} responses"
        console.print(Text.assemble("\n", (score.data_source, "bold"), amount), soft_wrap=True)
        console.print(_figures(score, evaluation.n))
    console.print()
    for note in _notes(evaluation):
        console.print(Text(note, style="yellow"), soft_wrap=True)
    files = f"{RESULTS_FILE}, {SAMPLES_FILE}, {PAGE_FILE}"
    console.print(f"{out}/  {files}", markup=False, soft_wrap=True)


def _figures(score: Score, n: int) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("stderr", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, worst in (score.worst_case or {}).items():
        best = (score.best_case or {}).get(name, worst)
        table.add_row(name.replace("avg", f"avg@{n}"), f"{worst:.3f} – {best:.3f}", "", "worst – best case")
    if score.worst_case is None:
        table.add_row(f"avg@{n}", *_shown(score.avg))
        for k, passed in score.pass_at.items():
            table.add_row(f"pass@{k}", *_shown(passed))
    if n > 1 and score.worst_case is None:
        votes = _shown(score.majority) if score.majority else ("—", "", "no answers to vote on")
        table.add_row(f"maj@{n}", *votes)
    table.add_row("truncated", *_shown(score.truncated_fraction, ".1%"))
    table.add_row("mean length", *_shown(score.mean_length, ".1f"))
    table.add_row("grader errors", *_shown(score.grader_error_fraction, ".1%"))
    return table


def _shown(estimate: IntervalFigure | None, number: str = ".3f") -> tuple[str, str, str]:
    """A figure, its standard error and its interval: `0.412`, `0.017`, `0.380 – 0.445`."""
    if estimate is None:
        return "—", "", "too few graded samples"
    value, stderr = f"{estimate.value:{number}}", _stderr(estimate.stderr, number)
    if estimate.low is None or estimate.high is None:
        return value, stderr, "—"
    return value, stderr, f"{estimate.low:{number}} – {estimate.high:{number}}"


def _stderr(stderr: float | None, number: str = ".3f") -> str:
    return "—" if stderr is None else f"{stderr:{number}}"


def _notes(evaluation: Evaluation) -> Iterator[str]:
    yield from evaluation.notes
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


def print_comparison(report: CompareReport) -> None:
    """Both figures, their difference with its interval, and the verdict, per source."""
    console = Console(highlight=False)
    for name, place in (("A", report.a), ("B", report.b)):
        console.print(Text.assemble((f"{name}  ", "bold"), place), soft_wrap=True)
    for comparison in report.comparisons:
        heading = Text.assemble("\n", (comparison.data_source, "bold"), _left_out(comparison))
        console.print(heading, soft_wrap=True)
        if comparison.figures:
            console.print(_differences(comparison.figures))
        console.print(Text(comparison.verdict, style="bold"), soft_wrap=True)
    if report.warnings:
        console.print()
    for warning in report.warnings:
        console.print(Text(warning, style="yellow"), soft_wrap=True)


def _left_out(comparison: Comparison) -> str:
    only = [
        f"{count:,} only in {side}"
        for side, count in (("A", comparison.num_only_a), ("B", comparison.num_only_b))
        if count
    ]
    return f": {comparison.num_shared:,} shared questions" + (f" ({', '.join(only)})" if only else "")


def _differences(figures: list[Figure]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for place, heading in enumerate(
        ("", "A", "stderr", "B", "stderr", "B − A", "stderr", "95 % interval", "p")
    ):
        table.add_column(heading, justify="right" if place else "left")
    for figure in figures:
        found = figure.difference
        has_interval = found.low is not None and found.high is not None
        table.add_row(
            figure.name,
            f"{figure.a:.3f}",
            _stderr(figure.a_stderr),
            f"{figure.b:.3f}",
            _stderr(figure.b_stderr),
            f"{found.value:+.3f}",
            _stderr(found.stderr),
            f"{found.low:+.3f} to {found.high:+.3f}" if has_interval else "—",
            "—" if found.p_value is None else f"{found.p_value:.2g}",
        )
    return table
