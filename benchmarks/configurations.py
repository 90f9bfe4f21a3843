"""Trains the reference guide's four configurations, its two examples, and the uncorrected baselines.

    python benchmarks/configurations.py [--seeds 1-5] [--workers 2] [--memory FILE]

Each run trains the embedded model with an unchanged preset. Prints a Markdown table. Seconds per step are
measured in separate runs, one at a time, with one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.learning import seeds_of
from benchmarks.runs import Job, Outcome, run_all

STEPS = ("trainer.total_training_steps=100",)
FEW_STEPS = ("trainer.total_training_steps=10", "actor.lr_warmup_steps=2")
#: The examples are specs for a 7B model on eight GPUs; here their algorithm trains the embedded model.
_SMALL = ("model.path=embedded", "data.train_files=[]", "data.val_files=[]", "trainer.n_gpus_per_node=1")
_EXAMPLE = (*_SMALL, "trainer.logger=console", "trainer.save_freq=-1")

#: Row of the table → presets and overrides.
CONFIGURATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "1. RLOO, sequence IS": (("rloo-seq-is",), ()),
    "2. GRPO, token IS, two RS": (("grpo-token-is-multi-rs",), ()),
    "3. PPO (GAE), sequence IS, token RS": (("ppo-seq-is-token-rs",), ()),
    "4. GRPO, RS only": (("grpo-rs-only",), ()),
    "RLOO, uncorrected": (("rloo-uncorrected",), ()),
    "GRPO, uncorrected": (("grpo-uncorrected",), ()),
    "PPO (GAE), uncorrected": (("ppo-uncorrected",), ()),
    "example 1 (RLOO)": (("qwen2.5-7b-rloo-seq-is", "embedded"), _EXAMPLE),
    "example 2 (GRPO, two RS)": (("qwen2.5-7b-grpo-multi-rs", "embedded"), _EXAMPLE),
}


def row(name: str, outcomes: list[Outcome], alone: Outcome) -> str:
    """One line of the table: means and range over the seeds, seconds per step of a run without others."""
    finished = [outcome for outcome in outcomes if not outcome.error]
    if not finished:
        return f"| {name} | no run finished | | | | | |"
    last = [outcome.last for outcome in finished]

    def mean(key: str) -> float:
        return statistics.fmean(outcome.means[key] for outcome in finished)

    failed = f" ({len(outcomes) - len(finished)} failed)" if len(finished) < len(outcomes) else ""
    return (
        f"| {name}{failed} | {statistics.fmean(o.first for o in finished):.2f} "
        f"| {statistics.fmean(last):.2f} | {min(last):.2f}–{max(last):.2f} "
        f"| {mean('raw_ess'):.3f} | {mean('masked'):.3f} | {alone.means['step_s']:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-5"), help="1-5 or 1,4,9")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, one core each")
    parser.add_argument("--memory", type=Path, default=Path("configurations.jsonl"), help="finished runs")
    options = parser.parse_args()
    jobs = [
        Job("configurations", name, seed, presets, (*overrides, *STEPS))
        for name, (presets, overrides) in CONFIGURATIONS.items()
        for seed in options.seeds
    ]
    timing = [
        Job("configurations, timed", name, 1, presets, (*overrides, *FEW_STEPS))
        for name, (presets, overrides) in CONFIGURATIONS.items()
    ]
    outcomes = run_all(jobs, options.memory, options.workers)
    alone = {job.name: outcome for job, outcome in run_all(timing, options.memory, 1).items()}
    print("| configuration | reward, first 5 | last 5 | over seeds | raw ESS | masked | s / step |")
    print("|---|---|---|---|---|---|---|")
    for name in CONFIGURATIONS:
        print(row(name, [o for job, o in outcomes.items() if job.name == name], alone[name]))


if __name__ == "__main__":
    main()
