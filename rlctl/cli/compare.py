"""`rlctl evaluate compare`: is one model better than another, and how sure is that."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rlctl.errors import UsageError


class Format(StrEnum):
    """How the comparison is printed."""

    TEXT = "text"
    JSON = "json"


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Directory of an evaluation.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Directory of another.")],
    k: Annotated[
        str | None,
        typer.Option("--k", metavar="K,…", help="Of pass@k.", show_default="1,4,8, up to the smaller n"),
    ] = None,
    output_format: Annotated[
        Format, typer.Option("--format", help="For people or for programs.")
    ] = Format.TEXT,
) -> None:
    """Compare two evaluations, question by question.

    Each question is compared with itself, which tells much smaller differences
    than looking whether two intervals overlap.

      rlctl evaluate compare RUN/evaluations/step_0 RUN/evaluations/step_100
    """
    from rlctl.evaluate.compare import compare as run_comparison

    report = run_comparison(a, b, None if k is None else numbers(k))
    if output_format is Format.JSON:
        import json

        typer.echo(json.dumps(report.as_document(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        from rlctl.cli.evaluate_output import print_comparison

        print_comparison(report)


def numbers(text: str) -> list[int]:
    """The k of `--k 1,4,8`.

    Raises:
        UsageError: it is something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"not a list of numbers: {text}", where="--k", fix="for example --k 1,4,8") from None
