"""`rlctl presets`: lists, shows and copies the shipped presets."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from rlctl.cli.command import Format, Out, complete_preset
from rlctl.errors import UsageError

app = typer.Typer(help="The shipped presets: list, read and copy them.", no_args_is_help=True)


@app.command("list")
def list_presets(output_format: Format = "text", out: Out = None) -> None:
    """All presets, one line each: algorithms, models, hardware, and complete examples.

    rlctl presets list

    rlctl presets list --format json

    Presets can be combined: -p llama3-8b -p 8gpu -p rloo-seq-is
    """
    from dataclasses import asdict

    from rich.text import Text

    from rlctl.cli.output import write_report
    from rlctl.run_spec.sources import all_presets
    from rlctl.text_table import print_table

    found = all_presets().values()
    rows = [(each.name, Text(each.kind, "dim"), each.description) for each in found]
    write_report(
        output_format,
        out,
        partial(print_table, headings=("preset", "kind", "what it is"), rows=rows, whole=range(2)),
        lambda: [asdict(each) | {"description": each.description} for each in found],
    )


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A preset, for example rloo-seq-is.", autocompletion=complete_preset
        ),
    ],
    out: Out = None,
) -> None:
    """Print a preset's file with its comments, or copy it to edit it.

    rlctl presets show rloo-seq-is

    rlctl presets show rloo-seq-is --output my-run.yaml && rlctl train my-run.yaml
    """
    from rlctl.cli.output import write_out
    from rlctl.run_spec.keys import did_you_mean
    from rlctl.run_spec.sources import all_presets

    preset = all_presets().get(name)
    if preset is None:
        fix = did_you_mean(name, all_presets(), "see `rlctl presets list`", cutoff=0.4)
        raise UsageError(f"no such preset: {name}", fix=fix)
    write_out(preset.path.read_text(encoding="utf-8"), out)
