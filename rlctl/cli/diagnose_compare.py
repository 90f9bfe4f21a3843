"""`rlctl diagnose compare`: differences between two runs, and the steps at which they begin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def compare(
    a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run directory or log, of any framework.")],
    b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another.")],
    output_format: Annotated[
        Literal["text", "json", "html"],
        typer.Option("--format", help="For people, for programs, or a page with both runs' plots."),
    ] = "text",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write there.", show_default="standard output"),
    ] = None,
) -> None:
    """Report what differs between two runs' specs and metrics, and since which step.

    Metrics are compared step by step. A metric differs if its medians over
    windows of several steps are further apart than the noise of both runs, for
    more than one window.

      rlctl diagnose compare runs/rlctl/good runs/rlctl/bad

      rlctl diagnose compare good.log bad.log --format html --out compared.html
    """
    from rlctl.cli.command import as_json
    from rlctl.cli.diagnose_reading import reading
    from rlctl.cli.output import check_out, text_console, write_out

    check_out([a, b], out, is_page=output_format == "html")
    from rlctl.diagnose.compare import compare as run_comparison
    from rlctl.diagnose.compare import comparison_document
    from rlctl.diagnose.rules import examine, metrics_read
    from rlctl.metric_names import ELSEWHERE, METRICS

    with reading([a, b], frozenset({*METRICS, *ELSEWHERE, *metrics_read()})) as runs:
        found = run_comparison(*(examine(run) for run in runs))
    if output_format == "text":
        from rlctl.diagnose.output_text import print_comparison

        with text_console(out) as console:
            print_comparison(console, found)
    elif output_format == "json":
        write_out(as_json(comparison_document(found)), out)
    else:
        from rlctl.diagnose.page.diagnosis_page import diagnosis_page

        write_out(diagnosis_page([found.a, found.b], found), out)
