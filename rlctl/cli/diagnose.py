"""`rlctl diagnose`: what a run's log says about its health."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer


class Format(StrEnum):
    """How the diagnosis is printed."""

    TEXT = "text"
    JSON = "json"


class FailOn(StrEnum):
    """From which severity on the exit code is 3."""

    WARNING = "warning"
    CRITICAL = "critical"


def diagnose(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH…", help="Run directories, or metrics.jsonl files.")
    ],
    output_format: Annotated[
        Format, typer.Option("--format", help="For people or for programs.")
    ] = Format.TEXT,
    fail_on: Annotated[
        FailOn | None,
        typer.Option("--fail-on", help="Exit with 3 when a finding is this severe.", show_default="never"),
    ] = None,
) -> None:
    """Say what is wrong with a run, why, and which change of its spec to try.

    rlctl diagnose runs/rlctl/rloo-seq-is-20260101-120000

    rlctl diagnose metrics.jsonl --format json --fail-on warning
    """
    from rlctl.diagnose.readers.detect import read_run
    from rlctl.diagnose.rules import METRICS_READ, examine

    diagnoses = [examine(read_run(path, METRICS_READ)) for path in paths]
    if output_format is Format.JSON:
        import json

        from rlctl.diagnose.report import as_document

        typer.echo(json.dumps(as_document(diagnoses), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        from rich.console import Console

        from rlctl.diagnose.report import print_diagnosis

        console = Console(highlight=False)
        for place, diagnosis in enumerate(diagnoses):
            if place:
                console.print()
            print_diagnosis(console, diagnosis)
    severity: Literal["warning", "critical"] | None = fail_on.value if fail_on else None
    if severity and any(diagnosis.reaches(severity) for diagnosis in diagnoses):
        raise typer.Exit(3)
