"""`rlctl diagnose RUN --what-if`: other corrections, tried on the rollouts the run dumped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rlctl.replay.tradeoff import Estimate, Outcome, Tradeoff

#: Rows of the table besides the run's own setting.
_SHOWN = 12


def what_if(paths: Sequence[Path], output_format: Literal["text", "json", "svg"] = "text") -> None:
    """Replay every run's dumped rollouts under a grid of corrections, and print what each would do.

    Args:
        paths: run directories or dumped rollouts.
        output_format: for people, for programs, or the bare picture.

    Raises:
        UsageError: there is nothing to replay.
    """
    from rlctl.replay.run import what_if as replayed

    found = [replayed(path) for path in paths]
    if output_format == "json":
        documents = [tradeoff.as_document() for tradeoff in found]
        typer.echo(json.dumps(documents, indent=2, ensure_ascii=False, allow_nan=False))
    elif output_format == "svg":
        from rlctl.replay.draw import svg

        for tradeoff in found:
            typer.echo(svg(tradeoff))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        for path, tradeoff in zip(paths, found, strict=True):
            print_tradeoff(console, str(path), tradeoff)


def print_tradeoff(console: Console, title: str, tradeoff: Tradeoff) -> None:
    """The recommendation, the best settings beside the run's own, and what was assumed."""
    from rich.text import Text

    console.print(Text(f"What if — {title}", style="bold"))
    counts = f"{tradeoff.num_sequences} responses, {tradeoff.num_tokens} tokens, {tradeoff.num_groups} groups"
    batch = f"errors are those of a mini-batch of {tradeoff.groups_per_batch:.0f} groups"
    console.print(f"{counts} of {tradeoff.num_steps} steps; {batch}")
    chosen = tradeoff.recommended
    if chosen:
        console.print(Text(f"try     {' '.join(chosen.overrides) or 'nothing else'}", style="bold green"))
        console.print(Text(f"why     {chosen.why}"))
    console.print(_table(tradeoff))
    for note in tradeoff.notes:
        console.print(Text(f"note    {note}", style="dim"))


def _table(tradeoff: Tradeoff) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("setting", overflow="fold", ratio=1)
    for name in ("error", "bias²", "variance", "ESS raw", "applied", "kept", "max w", "at bound"):
        table.add_column(name, justify="right")
    shown = [
        outcome
        for place, outcome in enumerate(tradeoff.outcomes)
        if place < _SHOWN or outcome.setting.family == "run"
    ]
    best = tradeoff.recommended.name if tradeoff.recommended else None
    for outcome in shown:
        own = outcome.setting.family == "run"
        style = "bold green" if outcome.setting.name == best else "bold" if own else ""
        table.add_row(*(Text(cell, style=style) for cell in _cells(outcome)))
    return table


def _cells(outcome: Outcome) -> list[str]:
    others = f" (= {', '.join(outcome.same_as)})" if outcome.same_as else ""
    return [
        outcome.setting.name + others,
        _with_interval(outcome.error),
        "–" if outcome.bias is None else f"{outcome.bias.value:.3f}",
        "–" if outcome.variance is None else f"{outcome.variance.value:.3f}",
        f"{outcome.raw_ess.value:.2f}",
        f"{outcome.applied_ess.value:.2f}",
        f"{outcome.kept_tokens:.0%}",
        f"{outcome.max_weight:.3g}",
        f"{outcome.at_bound:.1%}",
    ]


def _with_interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
