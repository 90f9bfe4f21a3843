"""`rlctl diagnose compare`: what differs between two runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.command import Out, PageFormat, run_path
from rlctl.cli.diagnose import read_all
from rlctl.errors import UsageError


def compare(
    a: Annotated[
        Path,
        typer.Argument(metavar="RUN_A", parser=run_path, help="A run directory or log, of any framework."),
    ],
    b: Annotated[Path, typer.Argument(metavar="RUN_B", parser=run_path, help="Another.")],
    output_format: PageFormat = "text",
    out: Out = None,
) -> None:
    """Report what differs between two runs' specs and metrics, and since which step.

    Metrics are compared step by step. A metric differs if its medians over
    windows of several steps are further apart than the noise of both runs, for
    more than one window.

      rlctl diagnose compare runs/rlctl/good runs/rlctl/bad

      rlctl diagnose compare good.log bad.log --format html --output compared.html
    """
    from rlctl.cli.output import check_out, write_report

    check_out([a, b], out, is_page=output_format == "html")
    from rlctl.diagnose.compare import compare as run_comparison
    from rlctl.diagnose.compare import comparison_document
    from rlctl.diagnose.diagnosis_page import diagnosis_page
    from rlctl.diagnose.output_text import print_comparison
    from rlctl.diagnose.rule import examine, metrics_read

    runs = list(read_all([a, b], metrics_read(with_others=True)))
    if len(runs) > 2:
        raise UsageError(f"{len(runs)} runs in {a} and {b}", fix="name two logs, or directories of one run")
    found = run_comparison(*map(examine, runs))
    write_report(
        output_format,
        out,
        partial(print_comparison, found=found),
        partial(comparison_document, found),
        html=partial(diagnosis_page, [found.a, found.b], found),
    )
