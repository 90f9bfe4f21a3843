"""Text and table of a replay: printed in a terminal, and shared with the HTML page."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlctl.what_if.tradeoff import SettingOutcome, Tradeoff

#: Rows of the terminal table, in addition to the run's own setting.
_SHOWN = 12


class Column(NamedTuple):
    """A table column: its name, in at most two lines, and its meaning."""

    name: str
    meaning: str


COLUMNS = (
    Column(
        "error",
        "mean squared error of the gradient at its best scale; 0 is the target gradient, 1 a useless one",
    ),
    Column(
        "sampling\ninterval",
        "contains the error of 90 % of resamples; it excludes the error of the estimate's own model",
    ),
    Column("bias²", "squared tangent of the angle between the expected and the target gradient"),
    Column("vari-\nance", "noise of a mini-batch's gradient over its useful signal, squared"),
    Column("ESS\nraw", "effective sample size over number, before bound and rejection"),
    Column("ESS\nused", "effective sample size over number, of the weights that reach the loss"),
    Column("kept", "tokens that are not rejected"),
    Column("max\nw", "largest weight that reaches the loss"),
    Column("at\nbound", "weights the bound changes"),
)


def cells(outcome: SettingOutcome) -> tuple[str, ...]:
    """Values of one setting, in the order of `COLUMNS`."""
    error = outcome.error
    return (
        "–" if error is None else f"{error.value:.3f}",
        "–" if error is None else f"{error.low:.3f}–{error.high:.3f}",
        "–" if outcome.bias is None else _short(outcome.bias.value),
        "–" if outcome.variance is None else _short(outcome.variance.value),
        f"{outcome.raw_ess.value:.2f}",
        f"{outcome.applied_ess.value:.2f}",
        f"{outcome.kept_tokens:.0%}",
        f"{outcome.max_weight:.3g}",
        f"{outcome.at_bound:.1%}",
    )


def name_of(outcome: SettingOutcome) -> str:
    """Name of the setting, names of two others with identical results, and the number of further ones."""
    named, more = outcome.same_as[:2], len(outcome.same_as) - 2
    others = ", ".join((*named, f"{more} more") if more > 0 else named)
    return outcome.setting.name + (f" (= {others})" if others else "")


def about(tradeoff: Tradeoff) -> str:
    """Describes the replayed data in one sentence."""
    counts = f"{tradeoff.num_sequences} responses, {tradeoff.num_tokens} tokens, {tradeoff.num_groups} groups"
    batch = f"errors are those of a mini-batch of {tradeoff.groups_per_batch:.0f} groups"
    return f"{counts} of {tradeoff.num_steps} steps; {batch}"


def advice(tradeoff: Tradeoff) -> tuple[tuple[str, str], ...]:
    """Returns (`try`, the change) and (`why`, its reason); empty if nothing can be recommended."""
    chosen = tradeoff.recommended
    if chosen is None:
        return ()
    return ("try", " ".join(chosen.overrides) or "nothing else"), ("why", chosen.why)


def is_recommended(tradeoff: Tradeoff, outcome: SettingOutcome) -> bool:
    """Whether this setting is the recommended one."""
    return tradeoff.recommended is not None and tradeoff.recommended.name == outcome.setting.name


def print_tradeoff(console: Console, title: str, tradeoff: Tradeoff) -> None:
    """Prints the recommendation, the assumptions, the best settings and the run's own."""
    head = Table.grid(padding=(0, 2))
    for label, text in advice(tradeoff):
        head.add_row(label, Text(text, style="bold green" if label == "try" else ""))
    for note in tradeoff.notes:
        head.add_row("note", Text(note, style="dim"))
    console.print(Text(f"What if — {title}", style="bold"))
    console.print(Text(about(tradeoff)))
    console.print(head)
    table = Table(box=None, pad_edge=False, header_style="dim", collapse_padding=True)
    table.add_column("setting", overflow="fold", ratio=1, min_width=20)
    for column in COLUMNS:
        table.add_column(column.name, justify="right", no_wrap=True)
    for place, outcome in enumerate(tradeoff.outcomes):
        best, own = is_recommended(tradeoff, outcome), outcome.setting.family == "run"
        if place < _SHOWN or own:
            style = "bold green" if best else "bold" if own else ""
            table.add_row(*(Text(cell, style=style) for cell in (name_of(outcome), *cells(outcome))))
    console.print(table)


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 10.0 else f"{value:.3g}"
