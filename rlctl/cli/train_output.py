"""Output of `rlctl train` before and after its live panel."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID, TimeElapsedColumn
from rich.table import Table

from rlctl.cli.output import plain_table, progress_bar
from rlctl.metric_names import validation_rewards
from rlctl.track.run_dir import SUMMARY_FILE
from rlctl.train.start import Announce


@contextmanager
def announcing() -> Iterator[Announce]:
    """Yields callbacks that print notes and show a progress bar while the embedded model is built (once)."""
    bar = progress_bar(TimeElapsedColumn())
    tasks: list[TaskID] = []

    def note(text: str) -> None:
        bar.console.print(text, markup=False, highlight=False)

    def progress(fraction: float, text: str) -> None:
        if not tasks:
            bar.start()
            tasks.append(bar.add_task(text, total=1.0))
        bar.update(tasks[0], completed=fraction, description=text)
        if fraction >= 1.0:
            bar.stop()

    try:
        yield Announce(note, progress)
    finally:
        if tasks:
            bar.stop()


def print_summary(run_dir: Path) -> None:
    """Prints results, files, and the next commands to run."""
    path = run_dir / SUMMARY_FILE
    if not path.is_file():
        return
    summary = json.loads(path.read_text(encoding="utf-8"))
    console = Console(highlight=False)
    ended = "interrupted" if summary["interrupted"] else "finished"
    console.print(
        f"\n[bold]{ended}[/bold] after step {summary['step']} of {summary['total_steps']}, "
        f"{summary['num_updates']} updates, {summary['seconds']:.0f} s\n"
    )
    if summary["first"]:
        console.print(_learned(summary))
    else:
        console.print("The run was already complete; for more steps: trainer.total_training_steps=N")
    if guarded := _guarded(summary):
        console.print(guarded, markup=False)
    _print_places(console, run_dir, summary)


def _guarded(summary: dict[str, Any]) -> str:
    """Line about alarms and actions of the guardrails; empty if there were none."""
    counts = summary.get("guardrails", {})
    if reason := counts.get("stopped_because"):
        return f"\nGuardrails stopped the run: {reason}"
    if not counts.get("alarms"):
        return ""
    return f"\nGuardrails: {counts['alarms']} alarms, {counts['interventions']} interventions"


def _learned(summary: dict[str, Any]) -> Table:
    figures = ("first steps", "last steps")
    table = plain_table(("", *figures), right=figures)
    names = {
        "critic/score/mean": "mean reward",
        "rollout_corr/rollout_is_raw_eff_sample_size": "ESS, raw",
        "rollout_corr/rollout_is_eff_sample_size": "ESS, applied",
        "rollout_corr/rollout_rs_masked_fraction": "masked fraction",
        "response_length/mean": "response length",
    }
    first, last = summary["first"], summary["last"]
    for key, name in names.items():
        if key in first:
            table.add_row(name, f"{first[key]:.3f}", f"{last[key]:.3f}")
    before, after = (validation_rewards(summary[f"validation_{when}"]) for when in ("first", "last"))
    for source, value in after.items():
        shown = (
            f"{before[source]:.3f}"
            if source in before and summary["validation_first"] != summary["validation_last"]
            else ""
        )
        table.add_row(f"validation, greedy ({source})", shown, f"{value:.3f}")
    return table


def _print_places(console: Console, run_dir: Path, summary: dict[str, Any]) -> None:
    place = escape(shlex.quote(str(run_dir)))
    console.print(f"\n[bold]Where[/bold]   {escape(str(run_dir))}", soft_wrap=True)
    for name, what in {
        "metrics.jsonl": "every metric of every step",
        "rollouts/": "responses with both policies' log-probs (Parquet)",
        summary["model"] + "/": "the trained model, a plain Hugging Face directory",
    }.items():
        if (run_dir / name).exists():
            console.print(f"        {name}  [dim]{what}[/dim]", soft_wrap=True)
    console.print("\n[bold]Next[/bold]")
    if summary["interrupted"]:
        console.print(f"        rlctl train --resume {place}", soft_wrap=True)
    console.print(f"        rlctl evaluate {place}", soft_wrap=True)
    console.print(f"        rlctl diagnose {place}", soft_wrap=True)
