"""`rlctl evaluate compare` and `rlctl evaluate list`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.cli.command import AsJson, Out, print_json
from rlctl.errors import UsageError


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
    from rlctl.cli.evaluate_output import print_comparison
    from rlctl.cli.output import check_out, write_report
    from rlctl.evaluate.compare import compare as run_comparison
    from rlctl.evaluate.compare import comparison_page

    output_format = "json" if is_json else output_format
    check_out([a, b], out, is_page=output_format == "html")
    report = run_comparison(a, b, None if k is None else numbers(k))
    text = partial(print_comparison, report)
    write_report(output_format, out, text, report.as_document, html=partial(comparison_page, report))


def numbers(text: str) -> list[int]:
    """Parses the argument of `--k`, e.g. `1,4,8`.

    Raises:
        UsageError: not a list of integers.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"not a list of numbers: {text}", where="--k", fix="for example --k 1,4,8") from None


def list_benchmarks(is_json: AsJson = False) -> None:
    """List the benchmarks: questions, source, revision, prompt and grader, all pinned.

    rlctl evaluate list

    rlctl evaluate list --json
    """
    from dataclasses import asdict

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
