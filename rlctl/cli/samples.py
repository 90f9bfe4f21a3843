"""`rlctl samples`: prints responses that a run sampled."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli.command import Format, Out, RunDirectory, count_option
from rlctl.errors import UsageError, steps_in_words, visible

if TYPE_CHECKING:
    from rlctl.terminal import Console
    from rlctl.track.texts import Decoder


def samples(
    run_dir: RunDirectory,
    step: Annotated[
        int | None,
        typer.Option("--step", "-s", metavar="N", help="Responses of this step.", show_default="the last"),
    ] = None,
    count: Annotated[int, count_option("--count", "-n", help="Responses to show.")] = 5,
    order: Annotated[
        Literal["first", "reward", "worst", "gap"],
        typer.Option("--sort", help="worst: by reward, rising; gap: largest |log ρ| first."),
    ] = "first",
    output_format: Format = "text",
    out: Out = None,
) -> None:
    """Print responses that a run sampled, with rewards and the log-ratio between both policies.

    `log ρ` is the sum over a response of training log-prob minus rollout log-prob, in nats.

      rlctl samples runs/rlctl/rloo-seq-is-20260101-120000

      rlctl samples runs/rlctl/rloo-seq-is-20260101-120000 --step 40 --sort gap -n 3
    """
    from rlctl.cli.output import write_report
    from rlctl.track.open_run import open_run
    from rlctl.track.texts import decoder_of

    record = open_run(run_dir)
    steps = record.rollout_steps()
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        what = f"the run saved no responses of step {chosen}"
        raise UsageError(what, where=str(run_dir), fix=f"kept: {steps_in_words(steps)}")
    found = [(row, _sample(row)) for row in record.rollouts(chosen).to_pylist()]
    found = sorted(found, key=lambda pair: _ORDERS[order](pair[1]))[:count]
    several = [(row, sample) for row, sample in found if row["num_turns"] > 1]
    if several and (decode := decoder_of(record)):
        for row, sample in several:
            sample["turns"] = _turns(row, decode)
    rows = [sample for _, sample in found]
    write_report(output_format, out, partial(_print_samples, rows=rows, step=chosen), lambda: rows)


def _reward(row: dict[str, Any]) -> float:
    return -math.inf if row["reward"] is None else float(row["reward"])


_ORDERS: dict[str, Callable[[dict[str, Any]], float]] = {
    "first": lambda _: 0,
    "reward": lambda row: -_reward(row),
    "worst": _reward,
    "gap": lambda row: -abs(row["log_ratio"]),
}


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    from rlctl.track.open_run import log_ratios

    ratios = log_ratios(row)
    kept = ("step", "data_source", "prompt", "response", "ground_truth", "reward", "truncated")
    counts = {"num_tokens": sum(row["sampled"]), "num_turns": row["num_turns"], "sequence": row["sequence"]}
    extremes = {
        "log_ratio": math.fsum(ratios) + 0.0,
        "largest_token_log_ratio": max(map(abs, ratios), default=0.0),
    }
    return {key: row[key] for key in kept} | counts | extremes


def _turns(row: dict[str, Any], decode: Decoder) -> list[dict[str, Any]]:
    """Number (null: not sampled, such as output of tools) and text of each turn of a sequence."""
    from rlctl.track.open_run import spans

    ids = row["token_ids"]
    return [
        {"turn": None if turn < 0 else turn + 1, "text": decode([ids[place] for place in span])}
        for turn, span in spans(row)
    ]


def _print_samples(console: Console, rows: list[dict[str, Any]], step: int) -> None:
    from rich.text import Text

    from rlctl.tiny.embedded import DATA_SOURCE, WRITTEN

    for row in rows:
        reward = "ungraded" if row["reward"] is None else f"{row['reward']:g}"
        cut = ", cut off at the limit" if row["truncated"] else ""
        turns = f" in {row['num_turns']} turns" if row["num_turns"] > 1 else ""
        turns += f", sequence {row['sequence'] + 1}" if row["sequence"] else ""
        size = f"{row['num_tokens']} tokens{turns}{cut}"
        head = f"step {step}  reward {reward}  {size}  log ρ {row['log_ratio']:+.4f}"
        console.print(Text(f"{head} (largest token {row['largest_token_log_ratio']:.4f})", "bold"))
        parts = [("prompt", row["prompt"], ""), ("response", row["response"], "")]
        if "turns" in row:
            parts[1:] = [
                (
                    f"turn {part['turn']}" if part["turn"] else "observation",
                    part["text"],
                    "" if part["turn"] else "dim",
                )
                for part in row["turns"]
            ]
        for name, text, style in (*parts, ("ground truth", row["ground_truth"], "")):
            console.print(Text.assemble((f"  {name:<13}", "dim"), (visible(text), style)))
        console.print()
    if any(row["data_source"] == DATA_SOURCE for row in rows):
        console.print(Text(WRITTEN, "dim"))
