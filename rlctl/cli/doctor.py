"""`rlctl doctor`: check what works on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.command import AsJson, print_json

if TYPE_CHECKING:
    from rlctl.doctor.checks import Check

_MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "broken": ("✗", "bold red")}


def doctor(
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="Read versions only; try no engine.")] = False,
) -> None:
    """Check packages, GPU, disks and network of this machine, and try every engine on a tiny model.

    Each trial runs in a separate process, so that a crash or a hang is reported as a failed check.
    Exit code 4 if something that training needs does not work.

      rlctl doctor

      rlctl doctor --json > doctor.json
    """
    from rlctl.doctor.examine import examine
    from rlctl.terminal import Console

    with Console(stderr=True).status("") as status:
        checks = examine(quick=quick, announce=status.update)
    num_broken = sum(check.status == "broken" for check in checks)
    if as_json:
        print_json({"works": not num_broken, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks, num_broken, quick=quick)
    raise typer.Exit(4 if num_broken else 0)


def _print(checks: list[Check], num_broken: int, *, quick: bool) -> None:
    """The checks, and the number of broken ones."""
    from rich.text import Text

    from rlctl.cli.output import unwrapped
    from rlctl.text_table import print_table

    console = unwrapped()
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
