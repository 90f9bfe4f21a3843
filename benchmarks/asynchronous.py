"""Measures asynchronous training: final reward and time per step against synchronous training.

    python benchmarks/asynchronous.py [--seeds 1-5] [--memory FILE] [KEY=VALUE …]

Trains the embedded job with sequence IS in decoupled mode (PPO clipping limits how far a batch moves the
policy), at half its usual learning rate, synchronously and with `rollout.max_staleness` 1, 2 and 4, one run
at a time. Prints Markdown: the validation reward of the final policy, mean and standard deviation over the
seeds; its difference to the synchronous run of the same seed with its 95 % interval; the p-value of
equivalence within ±`MARGIN` (TOST, Holm over the conditions); staleness in optimizer updates; seconds per
step (median over steps, mean over seeds) and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.intervals import holm, mean_interval, p_not_equivalent
from benchmarks.learning import seeds_of
from benchmarks.runs import Job, Outcome, run_all

PRESETS = ("rloo-seq-is",)
_CORRECTION = "algorithm.rollout_correction"
DECOUPLED = (
    *(f"{_CORRECTION}.bypass_mode=false", f"{_CORRECTION}.loss_type=ppo_clip", "actor.lr=4e-4"),
    *("trainer.test_freq=160", "rollout.val_kwargs.n=8", "rollout.val_kwargs.temperature=1.0"),
)
#: Final rewards count as equivalent if a test shows that their difference is within ± this.
MARGIN = 0.02
CONDITIONS = {"synchronous": ()} | {f"max_staleness {k}": (f"rollout.max_staleness={k}",) for k in (1, 2, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-5"), help="1-5 or 1,4,9; at least two")
    parser.add_argument("--memory", type=Path, default=Path("asynchronous.jsonl"), help="finished runs")
    parser.add_argument("overrides", nargs="*", help="of every run")
    options = parser.parse_args()
    # Seed by seed, so that a temporary load of the machine affects all conditions.
    jobs = [
        Job("asynchronous", name, seed, PRESETS, (*DECOUPLED, *setting, *options.overrides))
        for seed in options.seeds
        for name, setting in CONDITIONS.items()
    ]
    outcomes = run_all(jobs, options.memory, workers=1)
    rewards = {
        name: [outcomes[job].validation or 0.0 for job in jobs if job.name == name] for name in CONDITIONS
    }
    synchronous, *others = CONDITIONS
    minus = {
        name: [a - b for a, b in zip(rewards[name], rewards[synchronous], strict=True)] for name in others
    }
    equal = holm({name: p_not_equivalent(found, MARGIN) for name, found in minus.items()})
    print(
        "| | final reward (SD) | minus synchronous | equivalence, p | staleness | raw ESS | s/step | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    base = statistics.fmean(_means(outcomes, synchronous, "step_s"))
    for name, found in rewards.items():
        difference = ""
        if name in minus:
            mean, low, high = mean_interval(minus[name])
            difference = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}] | {equal[name]:.3f}"
        seconds = statistics.fmean(_means(outcomes, name, "step_s"))
        print(
            f"| {name} | {statistics.fmean(found):.3f} ({statistics.stdev(found):.3f}) | {difference or '|'} "
            f"| {statistics.fmean(_means(outcomes, name, 'staleness')):.1f} "
            f"| {statistics.fmean(_means(outcomes, name, 'raw_ess')):.2f} "
            f"| {seconds:.3f} | {seconds / base:.2f} |"
        )


def _means(outcomes: dict[Job, Outcome], name: str, metric: str) -> list[float]:
    """A metric of the runs of one condition: each run's mean (for seconds, median) over its steps."""
    return [outcome.means[metric] for job, outcome in outcomes.items() if job.name == name]


if __name__ == "__main__":
    main()
