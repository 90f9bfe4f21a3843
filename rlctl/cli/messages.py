"""Terminal output of errors and warnings (stderr)."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from rlctl.errors import Problem, RlctlError, SpecError, visible

_COLOURS = {"error": "bold red", "warning": "bold yellow"}


def print_error(error: RlctlError) -> None:
    """Prints what is wrong, where, and what to write instead."""
    console = Console(stderr=True)
    console.print(Text.assemble(("error: ", "bold red"), visible(error.what)), soft_wrap=True)
    if isinstance(error, SpecError):
        print_problems(error.problems, console)
    else:
        _print_details(console, error.where, error.fix)


def print_problems(problems: Iterable[Problem], console: Console | None = None) -> None:
    """Prints one paragraph per problem, errors first."""
    console = console or Console(stderr=True)
    for problem in sorted(problems, key=lambda problem: problem.severity):
        key = f"{problem.key}: " if problem.key else ""
        label = (f"{problem.severity}: ", _COLOURS[problem.severity])
        console.print(Text.assemble("  ", label, (key, "bold"), visible(problem.what)), soft_wrap=True)
        _print_details(console, problem.where, problem.fix, indent="      ")


def _print_details(console: Console, where: str | None, fix: str | None, indent: str = "  ") -> None:
    if where:
        console.print(Text(f"{indent}at   {visible(where)}", style="dim"), soft_wrap=True)
    if fix:
        console.print(Text(f"{indent}fix  {visible(fix)}", style="cyan"), soft_wrap=True)
