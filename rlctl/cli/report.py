"""`rlctl report`: writes one page about one or several runs, or serves it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.command import RunDirectories, echo, output_option
from rlctl.errors import UsageError


def report(
    runs: RunDirectories,
    out: Annotated[
        Path | None,
        output_option(metavar="FILE", help="Write there.", show_default="report.html in the first run"),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a page that follows the run, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="N", help="With --serve.", show_default="a free one"),
    ] = None,
) -> None:
    """Write or serve a page about runs: result, responses, curves.

    Findings and the spec are on it too. Responses are shaded token by token by
    the log-ratio of both policies, the spec is compared with its preset. Several
    runs share each plot, after the difference of their rewards. The page is
    self-contained. With --serve it follows runs that are training: at an address
    with a key, on this machine only.

      rlctl report runs/rlctl/rloo-seq-is-20260101-120000 --open

      rlctl report runs/rlctl/a runs/rlctl/b --output compared.html

      rlctl report runs/rlctl/a --serve
    """
    from rlctl.cli.output import check_out, write_file, write_out
    from rlctl.track.open_run import open_run

    for run in runs:
        open_run(run)
    if serve:
        if out is not None:
            raise UsageError(
                "a page that is served is not written", where="--output", fix="leave out one of both"
            )
        _serve(runs, port or 0, opens=open_page)
        return
    if port is not None:
        raise UsageError("only a page that is served has a port", where="--port", fix="add --serve")
    check_out(runs, out, is_page=out is not None)
    from rlctl.report.run_page import run_page

    if out is None:
        out = runs[0] / "report.html"
        write_file(out, run_page(runs), follow=False)
    else:
        write_out(run_page(runs), out)
    echo(str(out))
    if open_page:
        typer.launch(out.resolve().as_uri())


def _serve(runs: Sequence[Path], port: int, *, opens: bool) -> None:
    """Serves the page until Ctrl-C."""
    import sys
    import tempfile

    from rlctl.report.serve import PageServer, RunPages, tunnel

    pages = RunPages(runs)
    pages.page()  # its errors are those of the command
    with PageServer(pages, port) as server, tempfile.TemporaryDirectory(prefix="rlctl-page-") as private:
        echo(server.address)
        sys.stdout.flush()
        echo(f"Ctrl-C ends it. From another machine: {tunnel(server)}", err=True)
        if opens:
            typer.launch(_link(server.address, Path(private)).as_uri())
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            echo("ended", err=True)


def _link(address: str, private: Path) -> Path:
    """A file that leads a browser to an address: other users can read the command line of the browser."""
    file = private / "page.html"
    file.write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">', encoding="utf-8"
    )
    return file
