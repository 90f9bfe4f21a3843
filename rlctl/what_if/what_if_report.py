"""Output of a replay: text for a terminal, and a self-contained HTML page without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from rlctl.html_page import render
from rlctl.terminal import Console
from rlctl.text_table import print_table
from rlctl.what_if.tradeoff import SettingOutcome, Tradeoff

_FOLDER = Path(__file__).parent
#: Rows of the terminal table, in addition to the run's own setting.
_SHOWN = 12
#: Name of a table column, in at most two lines → its meaning.
COLUMNS = {
    "error": (
        "mean squared error of the gradient at its best scale; 0 is the target gradient, 1 a useless one"
    ),
    "sampling\ninterval": (
        "contains the error of 90 % of resamples; it excludes the error of the estimate's own model"
    ),
    "ESS\nraw": "effective sample size over number, before bound and rejection",
    "ESS\nused": "effective sample size over number, of the weights that reach the loss",
    "kept": "tokens that are not rejected",
    "max\nw": "largest weight that reaches the loss",
    "at\nbound": "weights the bound changes",
}


def cells(outcome: SettingOutcome) -> tuple[str, ...]:
    """Values of one setting, in the order of `COLUMNS`."""
    error = outcome.error
    return (
        "–" if error is None else f"{error.value:.3f}",
        "–" if error is None else f"{error.low:.3f}–{error.high:.3f}",
        f"{outcome.raw_ess:.2f}",
        f"{outcome.applied_ess:.2f}",
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
    styles = {"try": "bold green", "note": "dim"}
    lines = [*advice(tradeoff), *(("note", note) for note in tradeoff.notes)]
    console.print(Text(f"What if — {title}", style="bold"))
    console.print(Text(about(tradeoff)))
    print_table(console, ("", ""), [(label, Text(text, styles.get(label, ""))) for label, text in lines])
    rows = []
    for place, outcome in enumerate(tradeoff.outcomes):
        best, own = is_recommended(tradeoff, outcome), outcome.setting.family == "run"
        if place < _SHOWN or own:
            style = "bold green" if best else "bold" if own else ""
            rows.append([Text(cell, style=style) for cell in (name_of(outcome), *cells(outcome))])
    print_table(console, ("setting", *COLUMNS), rows, right=range(1, 1 + len(COLUMNS)))


# --- page -----------------------------------------------------------------------------------------


def page(replays: Sequence[tuple[str, Tradeoff]]) -> str:
    """Returns the page as HTML.

    Args:
        replays: title and result of each replay.
    """
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    functions = (about, advice, cells, is_recommended, name_of)
    return render(
        _FOLDER / "page.html.j2",
        title=f"What if: {' · '.join(title for title, _ in replays)}",
        style=style,
        replays=replays,
        report={"COLUMNS": COLUMNS} | {function.__name__: function for function in functions},
    )
