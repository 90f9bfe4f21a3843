"""Trains the preset `stale-token-is` and the same run without correction, per seed, at two learning rates.

    python benchmarks/stale.py [--seeds 1-5] [--workers 1] [--memory FILE]

The two runs of a pair differ in one key: `algorithm.rollout_correction.rollout_is`. The result of a run is
the validation reward of its final policy. Prints a table with 95 % intervals over the seeds (Student's t).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.intervals import mean_interval
from benchmarks.learning import seeds_of
from benchmarks.runs import Job, Outcome, run_all
from benchmarks.studies.off_policy import final_reward

PRESET = "stale-token-is"
CORRECTIONS = {"token IS": (), "none": ("algorithm.rollout_correction.rollout_is=null",)}
#: The preset's rate, and half of it: a smaller rate also makes an uncorrected run more stable.
RATES = (8e-4, 4e-4)


def job_of(correction: str, rate: float, seed: int) -> Job:
    """Job of one run."""
    return Job("stale", correction, seed, (PRESET,), (*CORRECTIONS[correction], f"actor.lr={rate:g}"))


def table(outcomes: dict[tuple[str, float], list[Outcome]]) -> str:
    """Per rate and correction: rewards by seed, their mean, the difference by seed to `none`, raw ESS."""
    lines = ["| learning rate | correction | final reward by seed | mean | minus none | raw ESS |"]
    lines += ["|---|---|---|---|---|---|"]
    for (name, rate), found in outcomes.items():
        rewards = [final_reward(outcome) for outcome in found]
        without = [final_reward(outcome) for outcome in outcomes["none", rate]]
        gain = [one - other for one, other in zip(rewards, without, strict=True)]
        cells = [f"{rate:g}", name, ", ".join(f"{reward:.2f}" for reward in rewards)]
        cells += [interval(rewards), interval(gain, "+") if name != "none" else ""]
        cells += [f"{statistics.fmean(outcome.means['raw_ess'] for outcome in found):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(values: list[float], sign: str = "") -> str:
    """Formats the mean and its 95 % interval, as far as rewards (with a sign: their differences) reach."""
    mean, low, high = mean_interval(values)
    return f"{mean:{sign}.2f} [{max(low, -1.0 if sign else 0.0):{sign}.2f}, {min(high, 1.0):{sign}.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-5"), help="1-5 or 1,4,9")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side, one core each")
    parser.add_argument("--memory", type=Path, default=Path("stale.jsonl"), help="finished runs")
    options = parser.parse_args()
    jobs = {
        (name, rate): [job_of(name, rate, seed) for seed in options.seeds]
        for rate in RATES
        for name in CORRECTIONS
    }
    outcomes = run_all([job for some in jobs.values() for job in some], options.memory, options.workers)
    print(table({key: [outcomes[job] for job in some] for key, some in jobs.items()}))


if __name__ == "__main__":
    main()
