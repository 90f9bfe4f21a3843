"""Sampling ahead while the trainer trains: the same reward, in how much less time?

    python benchmarks/asynchronous.py [--seeds 1-3] [--memory FILE] [KEY=VALUE …]

The embedded job with sequence IS in its decoupled form (PPO's clip bounds how far a batch moves the policy),
at half its usual learning rate, synchronous and with `rollout.max_staleness` 1, 2 and 4, one run at a time.
Prints Markdown: the mean reward at the end, over seeds with its standard deviation; its difference to the
synchronous run of the same seed; staleness in optimizer updates; seconds per step (median over steps,
mean over seeds) and their ratio.
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
_CORRECTION = "algorithm.rollout_correction"
DECOUPLED = (f"{_CORRECTION}.bypass_mode=false", f"{_CORRECTION}.loss_type=ppo_clip", "actor.lr=4e-4")
CONDITIONS = {"synchronous": ()} | {f"max_staleness {k}": (f"rollout.max_staleness={k}",) for k in (1, 2, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-3"), help="1-3 or 1,4,9")
    parser.add_argument("--memory", type=Path, default=Path("asynchronous.jsonl"), help="finished runs")
    parser.add_argument("overrides", nargs="*", help="of every run")
    options = parser.parse_args()
    # Seed by seed, so that a busy moment of the machine meets every condition.
    jobs = [
        Job("asynchronous", name, seed, PRESETS, (*DECOUPLED, *setting, *options.overrides))
        for seed in options.seeds
        for name, setting in CONDITIONS.items()
    ]
    outcomes = run_all(jobs, options.memory, workers=1)
    print("| | reward, first 5 | last 5 | minus synchronous | staleness | raw ESS | s per step | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    synchronous = [outcome for job, outcome in outcomes.items() if job.name == "synchronous"]
    base = statistics.fmean(outcome.means["step_s"] for outcome in synchronous)
    for name in CONDITIONS:
        mine = [outcome for job, outcome in outcomes.items() if job.name == name]
        last = _mean_and_spread([outcome.last for outcome in mine])
        minus = _mean_and_spread(
            [outcome.last - other.last for outcome, other in zip(mine, synchronous, strict=True)]
        )
        seconds = statistics.fmean(outcome.means["step_s"] for outcome in mine)
        first = statistics.fmean(outcome.first for outcome in mine)
        staleness = statistics.fmean(outcome.means["staleness"] for outcome in mine)
        raw_ess = statistics.fmean(outcome.means["raw_ess"] for outcome in mine)
        print(
            f"| {name} | {first:.2f} | {last} | {minus} | {staleness:.1f} | {raw_ess:.2f} "
            f"| {seconds:.3f} | {seconds / base:.2f} |"
        )


def _mean_and_spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


if __name__ == "__main__":
    main()
