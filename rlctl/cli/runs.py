"""`rlctl runs`: lists the runs below a directory."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.command import AsJson, echo, print_json
from rlctl.errors import UsageError, visible

if TYPE_CHECKING:
    from rlctl.track.open_run import RunState

_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "died": "red", "stopped": "yellow"}


def runs(
    root: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory to search, with its subdirectories.")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List every run below a directory: preset, model, step, state, last reward, last validation.

    States: running, finished, interrupted (Ctrl-C or a preemption), stopped (by the guardrails), failed
    (with the error), died (killed without a message), empty (no step was logged).

      rlctl runs

      rlctl runs /data/experiments --json
    """
    from rlctl.track.open_run import find_runs

    if not root.is_dir():
        raise UsageError("no such directory", where=str(root), fix="name the directory that holds the runs")
    found = find_runs(root)
    if as_json:
        print_json([asdict(run) for run in found])
    elif found:
        _print_runs(found, root)
    else:
        echo(f"No runs below {root}. `rlctl train --preset rloo-seq-is` starts one.")


def _print_runs(found: list[RunState], root: Path) -> None:
    from rich.text import Text

    from rlctl.cli.output import unwrapped
    from rlctl.text_table import print_table

    console, rows = unwrapped(), []
    for run in found:
        reward = "" if run.reward is None else f"{run.reward:.3f}"
        checked = ", ".join(f"{source} {value:.3f}" for source, value in run.validation.items())
        steps = f"{run.step}/{run.total_steps or '?'}"
        state = Text(run.state, _STYLES.get(run.state, ""))
        rows.append((_place(run, root), run.preset, run.model, steps, state, reward, checked))
    headings = ("run", "preset", "model", "step", "state", "reward", "validation")
    print_table(console, headings, rows, right=(3, 5), whole=(1,))
    for run in found:
        if run.reason:
            reason = visible(f"{_place(run, root)} {run.state}: {run.reason}")
            console.print(Text(reason, "dim"), soft_wrap=True)


def _place(run: RunState, root: Path) -> str:
    return str(run.path.relative_to(root) if run.path != root else run.path)
