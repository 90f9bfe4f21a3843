"""The mismatch report, printed on a terminal or as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rlctl.mismatch.causes import Cause
    from rlctl.mismatch.gap import Gap
    from rlctl.mismatch.search import Tried


@dataclass(frozen=True, slots=True)
class MismatchReport:
    """Result of a preflight."""

    #: trainer, engine: descriptions of what was compared
    trainer: str
    engine: str
    settings: str  # description of the requested settings
    num_sequences: int  # responses compared
    gap: Gap  # before any cause is accounted for
    causes: tuple[Cause, ...]  # each explains most of what the previous ones leave
    tried: tuple[Tried, ...]  # every single change tried with the trainer's model
    remainder: str | None  # possible origin of the part that no cause explains; None: there is none
    open_questions: tuple[str, ...]  # open questions, and what would answer them
    notes: tuple[str, ...] = ()  # messages to the user, such as damaged checkpoints that were skipped

    @property
    def conclusion(self) -> str:
        """The result in one sentence."""
        explained = f"{sum(cause.share for cause in self.causes):.0%} of the gap is explained"
        if self.gap.agrees:
            agreed = f"the engines agree to {_rounded_up(self.gap.abs_max)}"
            return f"{agreed}, but see below" if self.causes else agreed
        if not any(cause.share for cause in self.causes):
            return "none of the comparisons explains the gap"
        return f"{explained}: {', '.join(cause.name for cause in self.causes)}"


def as_document(report: MismatchReport) -> dict[str, Any]:
    """The report as values that can be written as JSON."""
    return {"conclusion": report.conclusion, **asdict(report)}


def print_report(console: Console, report: MismatchReport) -> None:
    """Prints the report on a terminal."""

    def line(*parts: str | tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)

    gap = report.gap
    line((report.conclusion, "bold"))
    line(("  trainer ", "dim"), report.trainer)
    line(("  engine  ", "dim"), report.engine)
    counts = f"{report.num_sequences} responses, {gap.num_tokens} tokens"
    line(("  request ", "dim"), f"{report.settings}; {counts}")
    line(
        ("  gap     ", "dim"),
        f"log-ratio r: mean |r| {gap.abs_mean:.2g}, mean {gap.mean:.2g}, std {gap.std:.2g}, max |r| "
        f"{gap.abs_max:.2g}; k3 {gap.k3:.2g}; ESS {gap.ess_token:.3f} per token, {gap.ess_sequence:.3f} "
        "per sequence",
    )
    for number, cause in enumerate(report.causes, start=1):
        share = f"{cause.share:.0%} of the gap" if cause.before else "does not show in the gap"
        line((f"\n{number}. {cause.name}", "bold yellow"), (f"  {share}", "dim"))
        line(f"  {cause.what}")
        if cause.before and cause.after:
            sizes = f"{cause.before.abs_mean:.2g} → {cause.after.abs_mean:.2g}"
            line((f"  mean |log-ratio| {sizes}", "dim"))
        line(("  fix   ", "dim"), cause.fix)
        for place, change in enumerate(cause.spec):
            line(("  or    " if place else "  try   ", "dim"), (change, "cyan"))
    console.print()
    if report.remainder:
        line((f"left: {report.remainder}", "yellow"))
    if not gap.agrees:
        _print_tried(console, report)
    for note in report.open_questions:
        line(("unknown   ", "dim"), note)
    for note in report.notes:
        line(("note  ", "dim"), note)


def _print_tried(console: Console, report: MismatchReport) -> None:
    """Prints the gap for every change of the scoring, each applied alone."""
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


def _cells(gap: Gap) -> list[str]:
    sizes = (gap.abs_mean, gap.mean, gap.std, gap.abs_max, gap.k3)
    return [f"{size:.2g}" for size in sizes] + [f"{gap.ess_token:.3f}", f"{gap.ess_sequence:.3f}"]


def _rounded_up(value: float) -> str:
    """Rounds up to one digit: 4.2e-7 → `5e-7`."""
    if value == 0.0:
        return "the last bit"
    power = math.floor(math.log10(value))
    return f"{math.ceil(value / 10**power):.0f}e{power}"
