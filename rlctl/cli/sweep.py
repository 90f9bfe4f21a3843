"""`rlctl sweep`: runs, resumes and compares every combination of some values."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.command import Format, Presets, complete_override, echo, output_option
from rlctl.errors import UsageError

if TYPE_CHECKING:
    from rlctl.terminal import Console
    from rlctl.train.sweep import SweepRow


def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=A,B|KEY=1..5|KEY=VALUE|FILE.yaml",
            help="Values to combine; values and spec files that all runs share.",
            autocompletion=complete_override,
        ),
    ] = None,
    preset: Presets = None,
    directory: Annotated[
        Path | None,
        output_option(
            "--dir",
            metavar="DIR",
            help="The sweep's directory; without values, the sweep in it continues.",
            show_default="runs/sweep-…, named after the request",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at a time.")] = 1,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Write a Slurm job array and print how to submit it; run nothing.")
    ] = False,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="An option of sbatch: --sbatch=--gpus=1.")
    ] = None,
    table_only: Annotated[bool, typer.Option("--table", help="Print the table; run nothing.")] = False,
    output_format: Format = "text",
    only: Annotated[int | None, typer.Option(min=0, hidden=True)] = None,
) -> None:
    """Train every combination of some values and compare the settings.

    The same command, or `--dir` alone, continues where it stopped: finished runs
    are skipped, others continue from their checkpoint. Settings are compared
    with the first one, paired by trainer.seed; with one seed they are paired by
    validation question.

      rlctl sweep -p rloo-seq-is actor.lr=1e-6,3e-6 trainer.seed=1..5

      rlctl sweep spec.yaml rollout.n=4,8 trainer.seed=1..3 --slurm --sbatch=--gpus=1
    """
    from rlctl.cli.output import write_report
    from rlctl.train.sweep import open_sweep, plan, run_sweep, slurm_script
    from rlctl.train.sweep import table as table_of

    asked = plan(preset or [], words) if words else None
    if asked is None and directory is None:
        fix = "name values to combine (actor.lr=1e-6,3e-6), or --dir of a sweep"
        raise UsageError("no sweep is given", where="rlctl sweep", fix=fix)
    place = directory or Path("runs") / f"sweep-{asked.key if asked else ''}"
    found = open_sweep(place, asked)
    if slurm:
        from rlctl.files import write_text

        script = place / "sweep.sbatch"
        write_text(script, slurm_script(place, found, jobs=jobs, options=sbatch or []))
        echo(f"sbatch {shlex.quote(str(script))}")
        return
    failed = 0
    if not table_only:
        echo(f"{place}: {len(found.runs)} runs", err=True)
        failed = run_sweep(place, found, jobs=jobs, note=lambda text: echo(text, err=True), only=only)
    if only is None:
        rows = table_of(place, found)
        write_report(output_format, None, partial(_print, rows=rows), lambda: [asdict(row) for row in rows])
    if failed:
        raise typer.Exit(1)


def _print(console: Console, rows: list[SweepRow]) -> None:
    from rlctl.text_table import print_table

    by = next((row.paired_by for row in rows if row.paired_by), "seed")
    headings = ("setting", "done", "reward", "± stderr", "− first", "95 % interval", "p")
    print_table(console, headings, map(_cells, rows), right=range(1, 7))
    console.print(f"Differences from the first setting are paired by {by}.", style="dim", soft_wrap=True)


def _cells(row: SweepRow) -> tuple[str, ...]:
    value, found = row.value, row.against_first
    return (
        " ".join(f"{key}={text}" for key, text in row.setting.items()) or "all",
        f"{row.num_done}/{row.num_runs}",
        f"{value.value:.4f}" if value else "",
        f"{value.stderr:.4f}" if value and value.stderr is not None else "",
        f"{found.value:+.4f}" if found else "",
        f"{found.low:+.4f} to {found.high:+.4f}" if found and found.low is not None else "",
        f"{found.p_value:.2g}" if found and found.p_value is not None else "",
    )
