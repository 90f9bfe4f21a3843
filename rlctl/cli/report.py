"""`rlctl report`: writes one page about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.command import RUN_HELP, complete_run, echo, output_option, run_path


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help=f"{RUN_HELP}.", autocompletion=complete_run, parser=run_path),
    ],
    out: Annotated[
        Path | None,
        output_option(metavar="FILE", help="Write there.", show_default="report.html in the first run"),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one page about a run: curves, findings, spec, validation, responses.

    Responses are shaded token by token by the log-ratio of both policies, the
    spec is compared with its preset, and several runs share each plot. The page
    is self-contained.

      rlctl report runs/rlctl/rloo-seq-is-20260101-120000 --open

      rlctl report runs/rlctl/a runs/rlctl/b --output compared.html
    """
    from rlctl.cli.output import check_out, write_out
    from rlctl.track.open_run import open_run

    for run in runs:
        open_run(run)
    out = out or runs[0] / "report.html"
    check_out(runs, out, is_page=True)
    from rlctl.report.run_page import run_page

    write_out(run_page(runs), out)
    echo(str(out))
    if open_page:
        typer.launch(out.resolve().as_uri())
