"""A mismatch report for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from rlctl.mismatch.cause import Cause
    from rlctl.mismatch.gap import Gap
    from rlctl.mismatch.search import Tried


@dataclass(frozen=True, slots=True)
class MismatchReport:
    """What a preflight found.

    Attributes:
        trainer, engine: what was compared, in words.
        settings: what was asked for, in words.
        num_sequences: responses compared.
        gap: as found, before anything is explained.
        causes: each explains most of what those before it leave.
        tried: every single comparison made with the trainer's model.
        remainder: what may hide in the part that no cause explains; None: there is none.
        not_told: what could not be told, and what would let it.
        notes: what the user should know, such as damaged checkpoints passed over.
    """

    trainer: str
    engine: str
    settings: str
    num_sequences: int
    gap: Gap
    causes: tuple[Cause, ...]
    tried: tuple[Tried, ...]
    remainder: str | None
    not_told: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        explained = f"{sum(cause.share for cause in self.causes):.0%} of the gap is explained"
        if self.gap.agrees:
            agreed = f"the engines agree to {_rounded_up(self.gap.abs_max)}"
            return f"{agreed}, but see below" if self.causes else agreed
        if not any(cause.share for cause in self.causes):
            return "none of the comparisons explains the gap"
        return f"{explained}: {', '.join(cause.name for cause in self.causes)}"


def as_document(report: MismatchReport) -> dict[str, Any]:
    """The report as JSON-able values."""
    document: dict[str, Any] = {"verdict": report.verdict} | asdict(report)
    return document


def print_report(console: Console, report: MismatchReport) -> None:
    """The report on a terminal."""
    from rich.text import Text

    console.print(Text(report.verdict, style="bold"), soft_wrap=True)
    facts = {
        "trainer": report.trainer,
        "engine": report.engine,
        "asked": f"{report.settings}; {report.num_sequences} responses, {report.gap.num_tokens} tokens",
        "gap": _in_words(report.gap),
    }
    for name, text in facts.items():
        console.print(Text.assemble((f"  {name:<8}", "dim"), text), soft_wrap=True)
    for number, cause in enumerate(report.causes, start=1):
        share = f"{cause.share:.0%} of the gap" if cause.before else "does not show in the gap"
        head = Text.assemble((f"\n{number}. {cause.name}", "bold yellow"), (f"  {share}", "dim"))
        console.print(head, soft_wrap=True)
        console.print(Text(f"  {cause.what}"), soft_wrap=True)
        if cause.before and cause.after:
            line = f"  mean |log-ratio| {cause.before.abs_mean:.2g} → {cause.after.abs_mean:.2g}"
            console.print(Text(line, style="dim"), soft_wrap=True)
        console.print(Text.assemble(("  fix   ", "dim"), cause.fix), soft_wrap=True)
        for place, change in enumerate(cause.spec):
            console.print(Text.assemble(("  try   " if not place else "  or    ", "dim"), (change, "cyan")))
    console.print()
    if report.remainder:
        console.print(Text(f"left: {report.remainder}", style="yellow"), soft_wrap=True)
    _print_tried(console, report)
    for note in report.not_told:
        console.print(Text.assemble(("not told  ", "dim"), note), soft_wrap=True)
    for note in report.notes:
        console.print(Text.assemble(("note  ", "dim"), note), soft_wrap=True)


def _print_tried(console: Console, report: MismatchReport) -> None:
    """Each comparison alone, on top of nothing."""
    from rich.table import Table

    if report.gap.agrees:
        return
    table = Table(box=None, header_style="dim", pad_edge=False, title_justify="left")
    table.add_column("the trainer variant")
    for column in ("mean |r|", "mean r", "std", "max |r|", "k3", "ESS tok", "ESS seq"):
        table.add_column(column, justify="right", no_wrap=True, min_width=7)
    table.add_row("nothing changed", *_cells(report.gap))
    for change in report.tried:
        if change.after is not None:
            table.add_row(f"{change.factor}: {change.value}", *_cells(change.after))
    console.print(table)
    console.print()


def _cells(gap: Gap) -> Iterator[str]:
    for value in (gap.abs_mean, gap.mean, gap.std, gap.abs_max, gap.k3):
        yield f"{value:.2g}"
    yield f"{gap.ess_token:.3f}"
    yield f"{gap.ess_sequence:.3f}"


def _in_words(gap: Gap) -> str:
    return (
        f"log-ratio r: mean |r| {gap.abs_mean:.2g}, mean {gap.mean:.2g}, std {gap.std:.2g}, max |r| "
        f"{gap.abs_max:.2g}; k3 {gap.k3:.2g}; ESS {gap.ess_token:.3f} per token, {gap.ess_sequence:.3f} "
        "per sequence"
    )


def _rounded_up(value: float) -> str:
    """To one digit: 4.2e-7 → `5e-7`."""
    if value == 0.0:
        return "the last bit"
    power = math.floor(math.log10(value))
    return f"{math.ceil(value / 10**power):.0f}e{power}"
