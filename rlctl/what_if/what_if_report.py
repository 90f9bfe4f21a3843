"""Output of a replay as text for a terminal."""

from __future__ import annotations

from rich.text import Text

from rlctl.terminal import Console
from rlctl.text_table import print_table
from rlctl.what_if.tradeoff import SettingOutcome, Tradeoff

#: Rows of the terminal table, in addition to the run's own setting.
_SHOWN = 12
#: Columns of the table; docs/how-to/what-if.md explains them.
COLUMNS = ("error", "sampling\ninterval", "ESS\nraw", "ESS\nused", "kept", "max\nw", "at\nbound")


def cells(outcome: SettingOutcome) -> tuple[str, ...]:
    """Values of one setting, in the order of `COLUMNS`."""
    error = outcome.error
    return (
        *(("–", "–") if error is None else (f"{error.value:.3f}", f"{error.low:.3f}–{error.high:.3f}")),
        f"{outcome.raw_ess:.2f}",
        f"{outcome.applied_ess:.2f}",
        f"{outcome.kept_tokens:.0%}",
        f"{outcome.max_weight:.3g}",
        f"{outcome.at_bound:.1%}",
    )


def name_of(outcome: SettingOutcome) -> str:
    """Name of the setting, names of two others with identical results, and the number of further ones."""
    named = outcome.same_as[:2]
    more = len(outcome.same_as) - 2
    others = ", ".join((*named, f"{more} more") if more > 0 else named)
    return outcome.setting.name + (f" (= {others})" if others else "")


def print_tradeoff(console: Console, title: str, tradeoff: Tradeoff) -> None:
    """Prints the recommendation, the assumptions, the best settings and the run's own."""
    console.print(Text(f"What if — {title}", style="bold"))
    counts = f"{tradeoff.num_sequences} responses, {tradeoff.num_tokens} tokens, {tradeoff.num_groups} groups"
    batch = f"errors are those of a mini-batch of {tradeoff.groups_per_batch:.0f} groups"
    console.print(f"{counts} of {tradeoff.num_steps} steps; {batch}")
    lines = [("note", Text(note, style="dim")) for note in tradeoff.notes]
    chosen = tradeoff.recommended
    if chosen is not None:
        change = " ".join(chosen.overrides) or "nothing else"
        lines = [("try", Text(change, style="bold green")), ("why", Text(chosen.why)), *lines]
    if tradeoff.usable_length is not None:
        usable = tradeoff.usable_length
        lines.append(("length", Text(usable.text, style="yellow" if usable.is_exceeded else "")))
    print_table(console, ("", ""), lines)
    rows = []
    for index, outcome in enumerate(tradeoff.outcomes):
        is_own = outcome.setting.family == "run"
        if index < _SHOWN or is_own:
            style = "bold" if is_own else ""
            if chosen is not None and chosen.name == outcome.setting.name:
                style = "bold green"
            rows.append([Text(cell, style=style) for cell in (name_of(outcome), *cells(outcome))])
    print_table(console, ("setting", *COLUMNS), rows, right=range(1, 1 + len(COLUMNS)))
