"""`rlctl runs`, `rlctl watch` and `rlctl samples`: list of runs, live panel, sampled responses."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli.command import AsJson, complete_run, print_json
from rlctl.errors import UsageError, visible

if TYPE_CHECKING:
    from rlctl.track.open_run import RunState

RunDirectory = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run directory, for example runs/rlctl/run-20260101-120000.",
        autocompletion=complete_run,
    ),
]

#: Seconds between two reads of a watched log.
_POLL_S = 0.5
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
        typer.echo(f"No runs below {root}. `rlctl train --preset rloo-seq-is` starts one.")


def watch(
    run_dir: RunDirectory,
    plain: Annotated[bool, typer.Option("--plain", help="One line per step instead of the panel.")] = False,
) -> None:
    """Show the live panel of a run that was started elsewhere, until it ends. Ctrl-C does not affect the run.

    rlctl watch runs/rlctl/rloo-seq-is-20260101-120000

    rlctl watch runs/rlctl/rloo-seq-is-20260101-120000 --plain
    """
    from rlctl.track.console import ConsoleSink
    from rlctl.track.jsonl import METRICS_FILE
    from rlctl.track.open_run import is_running, open_run, read_state

    record, log = open_run(run_dir), run_dir / METRICS_FILE
    state = read_state(run_dir)
    began = _seconds_since(state.started)
    sink = ConsoleSink(str(run_dir), state.total_steps, plain=plain, began_ago=began)
    num_rows = num_bytes = 0
    try:
        while True:
            running = is_running(run_dir)  # checked before the rows are read, so that none is missed
            size = log.stat().st_size if log.exists() else 0
            rows = record.rows()[num_rows:] if size != num_bytes else []
            for row in rows:
                ago = _seconds_since(row.pop("timestamp", None))
                sink.log(int(row.pop("step")), {k: float(v) for k, v in row.items()}, ago=ago)
            num_rows, num_bytes = num_rows + len(rows), size
            if not running:
                break
            time.sleep(_POLL_S)
    finally:
        sink.close("watched")
    state = read_state(run_dir)
    typer.echo(
        f"{state.state} after step {state.step}" + (f": {visible(state.reason)}" if state.reason else "")
    )


def _seconds_since(moment: str | None) -> float:
    """Seconds since an ISO 8601 time (UTC if it has no time zone); 0 if it is missing or invalid."""
    try:
        then = datetime.fromisoformat(moment or "")
    except ValueError:
        return 0.0
    return max(0.0, (datetime.now(UTC) - then.replace(tzinfo=then.tzinfo or UTC)).total_seconds())


def samples(
    run_dir: RunDirectory,
    step: Annotated[
        int | None,
        typer.Option("--step", "-s", metavar="N", help="Responses of this step; default: the last."),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Responses to show.")] = 5,
    order: Annotated[
        Literal["first", "reward", "worst", "gap"],
        typer.Option("--sort", help="worst: by reward, rising; gap: largest |log ρ| first."),
    ] = "first",
    as_json: AsJson = False,
) -> None:
    """Print responses that a run sampled, with rewards and the log-ratio between both policies.

    `log ρ` is the sum over a response of training log-prob minus rollout log-prob, in nats.

      rlctl samples runs/rlctl/rloo-seq-is-20260101-120000

      rlctl samples runs/rlctl/rloo-seq-is-20260101-120000 --step 40 --sort gap -n 3
    """
    from rlctl.track.open_run import open_run, steps_in_words

    record = open_run(run_dir)
    steps = record.rollout_steps()
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        what = f"the run saved no responses of step {chosen}"
        raise UsageError(what, where=str(run_dir), fix=f"kept: {steps_in_words(steps)}")
    rows = [_sample(row) for row in record.rollouts(chosen).to_pylist()]
    rows = sorted(rows, key=_ORDERS[order])[:count]
    if as_json:
        print_json(rows)
    else:
        _print_samples(rows, chosen)


def _reward(row: dict[str, Any]) -> float:
    return -math.inf if row["reward"] is None else float(row["reward"])


_ORDERS = {
    "first": lambda _: 0,
    "reward": lambda row: -_reward(row),
    "worst": _reward,
    "gap": lambda row: -abs(row["log_ratio"]),
}


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    from rlctl.track.open_run import log_ratios

    ratios = log_ratios(row)
    kept = ("step", "data_source", "prompt", "response", "ground_truth", "reward", "truncated")
    extremes = {
        "log_ratio": math.fsum(ratios) + 0.0,
        "largest_token_log_ratio": max(map(abs, ratios), default=0.0),
    }
    return {key: row[key] for key in kept} | {"num_tokens": len(ratios)} | extremes


def _print_samples(rows: list[dict[str, Any]], step: int) -> None:
    from rich.text import Text

    from rlctl.cli.output import unwrapped
    from rlctl.tiny.embedded import DATA_SOURCE, WRITTEN

    console = unwrapped()
    for row in rows:
        reward = "ungraded" if row["reward"] is None else f"{row['reward']:g}"
        cut = ", cut off at the limit" if row["truncated"] else ""
        head = f"step {step}  reward {reward}  {row['num_tokens']} tokens{cut}  log ρ {row['log_ratio']:+.4f}"
        console.print(Text(f"{head} (largest token {row['largest_token_log_ratio']:.4f})", "bold"))
        for name in ("prompt", "response", "ground_truth"):
            console.print(Text.assemble((f"  {name.replace('_', ' '):<13}", "dim"), visible(row[name])))
        console.print()
    if any(row["data_source"] == DATA_SOURCE for row in rows):
        console.print(Text(WRITTEN, "dim"))


def _print_runs(found: list[RunState], root: Path) -> None:
    from rich.text import Text

    from rlctl.cli.output import plain_table, unwrapped

    console = unwrapped()
    headings = ("run", "preset", "model", "step", "state", "reward", "validation")
    table = plain_table(headings, right=("step", "reward"))
    table.columns[1].min_width = min(24, max(len(run.preset) for run in found))
    for run in found:
        reward = "" if run.reward is None else f"{run.reward:.3f}"
        checked = ", ".join(f"{source} {value:.3f}" for source, value in run.validation.items())
        steps = f"{run.step}/{run.total_steps or '?'}"
        cells = (_place(run, root), run.preset, run.model, steps, run.state, reward, checked)
        texts = [Text(visible(cell)) for cell in cells]  # not markup
        texts[4].style = _STYLES.get(run.state, "")
        table.add_row(*texts)
    console.print(table)
    for run in found:
        if run.reason:
            reason = visible(f"{_place(run, root)} {run.state}: {run.reason}")
            console.print(Text(reason, "dim"), soft_wrap=True)


def _place(run: RunState, root: Path) -> str:
    return str(run.path.relative_to(root) if run.path != root else run.path)
