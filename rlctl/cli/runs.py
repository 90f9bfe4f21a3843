"""`rlctl runs`: lists the runs below a directory."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.command import RUNS, Format, Out, count_option
from rlctl.errors import UsageError, visible

if TYPE_CHECKING:
    from rlctl.terminal import Console
    from rlctl.track.open_run import RunState

_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "died": "red", "stopped": "yellow"}


def runs(
    root: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory to search, with its subdirectories.")
    ] = RUNS,
    count: Annotated[
        int | None, count_option("--count", "-n", help="Only the newest runs.", show_default="all")
    ] = None,
    output_format: Format = "text",
    out: Out = None,
) -> None:
    """List runs with their states and last rewards.

    Other commands accept the names as they are printed, or any part that no other run has. States: running,
    finished, interrupted (Ctrl-C or a preemption), stopped (by the guardrails), failed (with the error), died
    (killed without a message), empty (no step was logged).

      rlctl runs

      rlctl runs /data/experiments -n 5 --format json
    """
    from rlctl.cli.output import write_report
    from rlctl.track.open_run import find_runs

    if not root.is_dir():
        raise UsageError("no such directory", where=str(root), fix="name the directory that holds the runs")
    everything = find_runs(root)
    found = everything[-count if count else 0 :]
    names = Counter(run.path.name for run in everything)
    text = partial(_print_runs, found=found, root=root, names=names)
    write_report(output_format, out, text, lambda: [asdict(run) for run in found])


def _print_runs(console: Console, found: list[RunState], root: Path, names: Counter[str]) -> None:
    from rich.text import Text

    from rlctl.text_table import print_table

    if not found:
        console.print(f"No runs below {root}. `rlctl train --preset rloo-seq-is` starts one.", markup=False)
        return
    rows = []
    reasons = []
    for run in found:
        is_short = root == RUNS and names[run.path.name] == 1
        name = run.path.name if is_short else str(run.path)
        reward = "" if run.reward is None else f"{run.reward:.3f}"
        checked = ", ".join(f"{source} {value:.3f}" for source, value in run.validation.items())
        steps = f"{run.step}/{run.total_steps or '?'}"
        state = Text(run.state, _STYLES.get(run.state, ""))
        rows.append((name, steps, state, reward, "; ".join(filter(None, (run.preset, run.model, checked)))))
        if run.reason:
            reasons.append(Text(visible(f"{name} {run.state}: {run.reason}"), "dim"))
    headings = ("run", "step", "state", "reward", "preset; model; validation")
    print_table(console, headings, rows, right=(1, 3), whole=(0, 2))
    for reason in reasons:
        console.print(reason, soft_wrap=True)
