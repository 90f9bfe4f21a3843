"""`rlctl samples`: prints responses that a run sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rlctl.cli.command import Format, Out, RunDirectory, Step, count_option
from rlctl.errors import UsageError, steps_in_words

if TYPE_CHECKING:
    from rlctl.terminal import Console
    from rlctl.track.texts import Decoder

#: Minimum number of characters of what all prompts begin with, to be printed only once.
MIN_SHARED = 60


def samples(
    run_dir: RunDirectory,
    step: Step = None,
    count: Annotated[int, count_option("--count", "-n", help="Responses to show.")] = 5,
    order: Annotated[
        Literal["first", "reward", "worst", "gap"],
        typer.Option("--sort", help="worst: by reward, rising; gap: largest |log ρ| first."),
    ] = "first",
    output_format: Format = "text",
    out: Out = None,
) -> None:
    """Print responses of a run, with their rewards and log-ratios.

    `log ρ` is the sum over a response of training log-prob minus rollout log-prob, in nats.

      rlctl samples runs/rlctl/rloo-seq-is-20260101-120000

      rlctl samples runs/rlctl/rloo-seq-is-20260101-120000 --step 40 --sort gap -n 3
    """
    from rlctl.cli.output import write_report
    from rlctl.track.open_run import chosen_step, open_run
    from rlctl.track.texts import decoder_of

    record = open_run(run_dir)
    steps = record.rollout_steps()
    number = chosen_step(run_dir, step)
    chosen = steps[-1] if number is None else number
    if chosen not in steps:
        message = f"the run saved no responses of step {chosen}"
        raise UsageError(message, where=str(run_dir), fix=f"kept: {steps_in_words(steps)}")
    chosen_rows = [(row, _sample(row)) for row in record.rollouts(chosen).to_pylist()]
    chosen_rows = sorted(chosen_rows, key=lambda pair: _ORDERS[order](pair[1]))[:count]
    several = [(row, sample) for row, sample in chosen_rows if row["num_turns"] > 1]
    if several and (decode := decoder_of(record)):
        for row, sample in several:
            sample["turns"] = _turns(row, decode)
    rows = [sample for _, sample in chosen_rows]
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
    terms = {"terms": dict(row.get("terms") or [])}
    return {key: row[key] for key in kept} | terms | counts | extremes


def _turns(row: dict[str, Any], decode: Decoder) -> list[dict[str, Any]]:
    """Number (null: not sampled, such as output of tools) and text of each turn of a sequence."""
    from rlctl.track.open_run import spans

    ids = row["token_ids"]
    return [
        {"turn": None if turn < 0 else turn + 1, "text": decode([ids[place] for place in span])}
        for turn, span in spans(row)
    ]


def shared_start(prompts: list[str]) -> str:
    """The lines with which all of several prompts begin, such as a system prompt; "" if they are short."""
    if len(prompts) < 2:
        return ""
    low, high = min(prompts), max(prompts)  # all others are between them
    differ = (index for index, (one, other) in enumerate(zip(low, high, strict=False)) if one != other)
    start = low[: next(differ, len(low))]
    if len(set(prompts)) > 1:
        start = start[: start.rfind("\n") + 1]
    return start if len(start) >= MIN_SHARED else ""


def _print_samples(console: Console, rows: list[dict[str, Any]], step: int) -> None:
    from rich.text import Text

    from rlctl.cli.output import print_labelled
    from rlctl.tiny.embedded import DATA_SOURCE, WRITTEN

    start = shared_start([row["prompt"] for row in rows])
    if start:
        console.print(Text(f"each prompt begins with ({len(start):,} characters)", "bold"))
        print_labelled(console, "prompt", start)
        console.print()
    for row in rows:
        console.print(Text(_head(step, row), "bold"))
        prompt = row["prompt"]
        if start:
            own = prompt.removeprefix(start)
            prompt = f"… {own}" if own else "as above"
        print_labelled(console, "prompt", prompt)
        if "turns" not in row:
            print_labelled(console, "response", row["response"])
        for span in row.get("turns", ()):
            if span["turn"]:
                print_labelled(console, f"turn {span['turn']}", span["text"])
            else:
                print_labelled(console, "observation", span["text"], "dim")
        print_labelled(console, "ground truth", row["ground_truth"])
        console.print()
    if any(row["data_source"] == DATA_SOURCE for row in rows):
        console.print(Text(WRITTEN, "dim"))


def _head(step: int, row: Mapping[str, Any]) -> str:
    """Reward, size and log-ratio of a response."""
    reward = "ungraded" if row["reward"] is None else f"{row['reward']:g}"
    if row["terms"]:
        terms = ", ".join(f"{label} {score:g}" for label, score in row["terms"].items())
        reward += f" ({terms})"
    size = f"{row['num_tokens']} tokens"
    if row["num_turns"] > 1:
        size += f" in {row['num_turns']} turns"
    if row["sequence"]:
        size += f", sequence {row['sequence'] + 1}"
    if row["truncated"]:
        size += ", cut off at the limit"
    largest = f"(largest token {row['largest_token_log_ratio']:.4f})"
    return f"step {step}  reward {reward}  {size}  log ρ {row['log_ratio']:+.4f} {largest}"
