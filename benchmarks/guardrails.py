"""Measures whether guardrails rescue collapsing runs and leave healthy runs unchanged.

    python benchmarks/guardrails.py [--seeds 1-5] [--workers 1] [--memory FILE] [--part collapse|healthy]

The collapsing job is the embedded task with four updates per batch, a constant learning rate that is too high
and no warm-up; each run once with `trainer.guardrails.mode=warn` and once with `act`. The healthy runs are
unchanged presets with the embedded model and `act`. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.learning import seeds_of
from benchmarks.runs import WINDOW, Job, Outcome, run_all

_COLLAPSING = (
    "data.train_batch_size=64",
    "actor.ppo_mini_batch_size=16",
    "actor.lr_warmup_steps=0",
    "actor.lr_scheduler_type=constant",
    "trainer.total_training_steps=60",
)
RATES = ("1e-3", "2e-3")
MODES = ("warn", "act")
HEALTHY = ("rloo-seq-is", "grpo-token-is-multi-rs", "ppo-seq-is-token-rs")
STEPS = 60


def collapsing_jobs(seeds: list[int]) -> list[Job]:
    """Jobs of every rate, seed and mode."""
    return [
        Job(
            "guardrails, collapse",
            f"{rate} {mode}",
            seed,
            ("rloo-seq-is",),
            (*_COLLAPSING, f"actor.lr={rate}", f"trainer.guardrails.mode={mode}"),
        )
        for rate in RATES
        for seed in seeds
        for mode in MODES
    ]


def healthy_jobs(seeds: list[int]) -> list[Job]:
    """Jobs of every preset and seed."""
    overrides = (f"trainer.total_training_steps={STEPS}", "trainer.guardrails.mode=act")
    return [
        Job("guardrails, healthy", preset, seed, (preset,), overrides) for seed in seeds for preset in HEALTHY
    ]


def total(outcome: Outcome, name: str) -> int:
    """Sum of a metric over the run."""
    return round(outcome.means[name] * len(outcome.rewards))


def collapse_table(outcomes: dict[Job, Outcome]) -> str:
    """One line per rate and seed: without and with acting guardrails."""
    lines = [
        f"| lr | seed | first | last {WINDOW}, warn | lowest | last {WINDOW}, act | lowest "
        "| updates held back | withheld |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    by_name = {(job.name, job.seed): outcome for job, outcome in outcomes.items()}
    for rate in RATES:
        for seed in sorted({job.seed for job in outcomes}):
            without, guarded = (by_name[f"{rate} {mode}", seed] for mode in MODES)
            lines.append(
                f"| {rate} | {seed} | {without.rewards[0]:.2f} "
                f"| {without.last:.2f} | {min(without.rewards):.2f} "
                f"| {guarded.last:.2f} | {min(guarded.rewards):.2f} "
                f"| {total(guarded, 'interventions')} | {total(guarded, 'skipped')} |"
            )
    return "\n".join(lines)


def healthy_table(outcomes: dict[Job, Outcome]) -> str:
    """One line per preset, over all seeds."""
    lines = [
        f"| preset | seeds | batches | first {WINDOW} | last {WINDOW} | alarms | interventions |",
        "|---|---|---|---|---|---|---|",
    ]
    for preset in HEALTHY:
        runs = [outcome for job, outcome in outcomes.items() if job.name == preset]
        first, last = ([getattr(run, end) for run in runs] for end in ("first", "last"))
        lines.append(
            f"| `{preset}` | {len(runs)} | {sum(len(run.rewards) for run in runs)} "
            f"| {min(first):.2f}–{max(first):.2f} | {min(last):.2f}–{max(last):.2f} "
            f"| {sum(total(run, 'alarms') for run in runs)} "
            f"| {sum(total(run, 'interventions') for run in runs)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-5"), help="1-5 or 1,4,9")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side, one core each")
    parser.add_argument("--memory", type=Path, default=Path("guardrails.jsonl"), help="finished runs")
    parser.add_argument("--part", choices=("collapse", "healthy"), help="only this half")
    options = parser.parse_args()
    parts = {"collapse": (collapsing_jobs, collapse_table), "healthy": (healthy_jobs, healthy_table)}
    for name in (options.part,) if options.part else parts:
        jobs, table = parts[name]
        print(table(run_all(jobs(options.seeds), options.memory, options.workers)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
