"""Sampling ahead while the trainer trains: the same reward, in how much less time?

    python benchmarks/asynchronous.py [--seeds 1-3] [--memory FILE] [KEY=VALUE …]

The embedded job with sequence IS, synchronous and with `rollout.max_staleness` 1, 2 and 4, one run at a
time. Prints Markdown: the mean reward at the end, over seeds with its standard deviation; seconds per
step (median over steps, mean over seeds) and its ratio to the synchronous run's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.learning import seeds_of
from benchmarks.runs import Job, run_all

PRESETS = ("rloo-seq-is",)
CONDITIONS = {"synchronous": ()} | {f"max_staleness {k}": (f"rollout.max_staleness={k}",) for k in (1, 2, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-3"), help="1-3 or 1,4,9")
    parser.add_argument("--memory", type=Path, default=Path("asynchronous.jsonl"), help="finished runs")
    parser.add_argument("overrides", nargs="*", help="of every run")
    options = parser.parse_args()
    # Seed by seed, so that a busy moment of the machine meets every condition.
    jobs = [
        Job("asynchronous", name, seed, PRESETS, (*setting, *options.overrides))
        for seed in options.seeds
        for name, setting in CONDITIONS.items()
    ]
    outcomes = run_all(jobs, options.memory, workers=1)
    print("| | reward, first 5 steps | reward, last 5 steps | staleness, updates | s per step | ratio |")
    print("|---|---|---|---|---|---|")
    base = None
    for name in CONDITIONS:
        mine = [outcome for job, outcome in outcomes.items() if job.name == name]
        last = [outcome.last for outcome in mine]
        seconds = statistics.fmean(outcome.means["step_s"] for outcome in mine)
        base = base or seconds
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        first = statistics.fmean(outcome.first for outcome in mine)
        staleness = statistics.fmean(outcome.means["staleness"] for outcome in mine)
        print(
            f"| {name} | {first:.2f} | {statistics.fmean(last):.3f} ± {spread:.3f} | {staleness:.1f} "
            f"| {seconds:.3f} | {seconds / base:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
