"""`rlctl doctor`: check what works on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.command import Format, Out

if TYPE_CHECKING:
    from rlctl.doctor.checks import Check
    from rlctl.terminal import Console

#: Most names in the line of a group of checks.
_MOST_NAMED = 5
_MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "broken": ("✗", "bold red")}


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Read versions only; try no engine.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="A line for every check, all versions.")] = False,
    output_format: Format = "text",
    out: Out = None,
) -> None:
    """Check packages and machine, and try every engine.

    What works is named in a line, what does not has a line each. Each engine is tried in a separate process,
    so that a crash or a hang is reported as a failed check. Exit code 4 if something that is installed does
    not work. Of the base installation, what training needs is only named.

      rlctl doctor

      rlctl doctor --all

      rlctl doctor --format json --output doctor.json
    """
    from rlctl.cli.output import write_report
    from rlctl.doctor.examine import examine
    from rlctl.terminal import Console

    with Console(stderr=True).status("") as status:
        checks = examine(quick=quick, announce=status.update)
    num_broken = sum(check.status == "broken" for check in checks)
    text = partial(_print, checks=checks if show_all else in_short(checks), quick=quick)
    document = {"works": not num_broken, "checks": [asdict(check) for check in checks]}
    write_report(output_format, out, text, lambda: document)
    raise typer.Exit(4 if num_broken else 0)


def in_short(checks: Sequence[Check]) -> list[Check]:
    """Every check that did not succeed, after one for each group of those that did."""
    from rlctl.doctor.checks import Check

    short = []
    for group in dict.fromkeys(check.group for check in checks):
        succeeded = [check for check in checks if check.group == group and check.status == "ok"]
        texts = [check.name for check in succeeded]
        if group == "packages":
            texts = [
                text for check in succeeded if check.name == "versions" for text in check.found.split(", ")
            ]
        if texts:
            left = len(texts) - _MOST_NAMED
            texts = texts[:_MOST_NAMED] + ([f"{left} more"] if left > 0 else [])
            short.append(Check(group, group, "ok", ", ".join(texts)))
    return [*short, *(check for check in checks if check.status != "ok")]


def _print(console: Console, checks: list[Check], *, quick: bool) -> None:
    """The checks, and the number of broken ones."""
    from rich.text import Text

    from rlctl.text_table import print_table

    rows = []
    for check in checks:
        fix = (f"\nfix  {check.fix}", "cyan") if check.fix else ""
        rows.append((Text(*_MARKS[check.status]), check.name, Text.assemble(check.found, fix)))
    print_table(console, ("", "", ""), rows, whole=range(2))
    num_broken = sum(check.status == "broken" for check in checks)
    conclusion = ("Everything that training needs works", "bold green")
    if num_broken:
        text = f"{num_broken} of these checks failed: training, or the failed part of it, does not work"
        conclusion = (text, "bold red")
    elif any(check.name == "installation" and check.status == "note" for check in checks):
        conclusion = ("What is installed works; training needs packages that are not", "bold green")
    elif quick:
        conclusion = ("No problem found; no engine was tried", "bold green")
    console.print(Text.assemble("\n", conclusion))
