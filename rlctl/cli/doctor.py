"""`rlctl doctor`: check what works on this machine."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.command import Format, Out

if TYPE_CHECKING:
    from rlctl.doctor.checks import Check
    from rlctl.terminal import Console

_MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "broken": ("✗", "bold red")}


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Read versions only; try no engine.")] = False,
    output_format: Format = "text",
    out: Out = None,
) -> None:
    """Check packages, GPU, disks and network of this machine, and try every engine on a tiny model.

    Each trial runs in a separate process, so that a crash or a hang is reported as a failed check.
    Exit code 4 if something that training needs does not work.

      rlctl doctor

      rlctl doctor --format json --output doctor.json
    """
    from rlctl.cli.output import write_report
    from rlctl.doctor.examine import examine
    from rlctl.terminal import Console

    with Console(stderr=True).status("") as status:
        checks = examine(quick=quick, announce=status.update)
    num_broken = sum(check.status == "broken" for check in checks)
    text = partial(_print, checks=checks, num_broken=num_broken, quick=quick)
    document = {"works": not num_broken, "checks": [asdict(check) for check in checks]}
    write_report(output_format, out, text, lambda: document)
    raise typer.Exit(4 if num_broken else 0)


def _print(console: Console, checks: list[Check], num_broken: int, *, quick: bool) -> None:
    """The checks, and the number of broken ones."""
    from rich.text import Text

    from rlctl.text_table import print_table

    rows = []
    for check in checks:
        fix = (f"\nfix  {check.fix}", "cyan") if check.fix else ""
        rows.append((Text(*_MARKS[check.status]), check.name, Text.assemble(check.found, fix)))
    print_table(console, ("", "", ""), rows, whole=range(2))
    conclusion = ("Everything that training needs works", "bold green")
    if num_broken:
        text = f"{num_broken} of these checks failed: training, or the failed part of it, does not work"
        conclusion = (text, "bold red")
    elif quick:
        conclusion = ("No problem found; no engine was tried", "bold green")
    console.print(Text.assemble("\n", conclusion))
