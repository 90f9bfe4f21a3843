"""Table and plot of `off_policy.py`: what each correction does, with intervals over the seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from scipy import stats

from benchmarks.off_policy import CONDITIONS, METHODS
from benchmarks.runs import Job, Outcome

GOAL = 0.8
#: A run has collapsed when it ends below half of the best it ever had (means of five steps).
COLLAPSED = 0.5

Table = dict[str, dict[str, list[Outcome]]]  # condition → method → outcomes by seed


def write_report(outcomes: dict[Job, Outcome], out: Path) -> None:
    """`off_policy.md` and `off_policy.png` in `out`."""
    table: Table = {condition: {method: [] for method in METHODS} for condition in CONDITIONS}
    for job in sorted(outcomes, key=lambda job: job.seed):
        condition, method = job.name.split(" | ")
        table[condition][method].append(outcomes[job])
    (out / "off_policy.md").write_text(markdown(table))
    plot(table, out / "off_policy.png")


def markdown(table: Table) -> str:
    """One row per condition and method; brackets are 95 % intervals (Student's t; Wilson's for a rate)."""
    lines = [
        f"| condition | method | final reward | minus `none`, same seed | batches to {GOAL} | collapsed "
        "| raw ESS | masked |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for condition, methods in table.items():
        for method, runs in methods.items():
            last = [run.last for run in runs]
            gain = [run.last - other.last for run, other in zip(runs, methods["none"], strict=True)]
            cells = [
                *(condition, method, interval(last), "" if method == "none" else interval(gain)),
                *(
                    reaching(runs),
                    collapse_rate(runs),
                    f"{mean(runs, 'raw_ess'):.3f}",
                    f"{mean(runs, 'masked'):.3f}",
                ),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def reaching(runs: Sequence[Outcome]) -> str:
    """Median batch at which the goal was reached, runs that never did counting as later than all."""
    steps = [run.reached(GOAL) for run in runs]
    median = statistics.median(math.inf if step is None else step for step in steps)
    when = f"> {len(runs[0].rewards)}" if median == math.inf else f"{median:.0f}"
    return f"{when} ({sum(step is not None for step in steps)} of {len(steps)})"


def interval(values: Sequence[float]) -> str:
    """Mean and its 95 % interval."""
    middle = statistics.fmean(values)
    low, high = bounds(values)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]".replace("-0.00", "0.00")


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean by Student's t; the value itself where there is no spread."""
    error = stats.sem(values)
    if not error > 0:
        return values[0], values[0]
    low, high = stats.t.interval(0.95, len(values) - 1, loc=statistics.fmean(values), scale=error)
    return float(low), float(high)


def collapse_rate(runs: Sequence[Outcome]) -> str:
    """Runs that lost what they had learned, with Wilson's interval."""
    count = sum(has_collapsed(run) for run in runs)
    rate = stats.binomtest(count, len(runs)).proportion_ci(method="wilson")
    return f"{count} of {len(runs)} [{rate.low:.2f}, {rate.high:.2f}]"


def has_collapsed(run: Outcome) -> bool:
    """Stopped by the trainer, or ended below half of its best."""
    best = max(statistics.fmean(run.rewards[i : i + 5]) for i in range(max(1, len(run.rewards) - 4)))
    return bool(run.error) or run.last < COLLAPSED * best


def mean(runs: Sequence[Outcome], key: str) -> float:
    """Of a kept metric over steps and seeds."""
    return statistics.fmean(run.means[key] for run in runs)


def plot(table: Table, path: Path) -> None:
    """Learning curves, mean over the seeds, one panel per condition."""
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.5), sharex=True, sharey=True, layout="constrained")
    for axis, (condition, methods) in zip(axes.flat, table.items(), strict=True):
        for method, runs in methods.items():
            length = min(len(run.rewards) for run in runs)
            curves = np.array([smooth(run.rewards[:length]) for run in runs])
            axis.plot(np.arange(1, length + 1), curves.mean(0), label=method, linewidth=1.4)
        axis.set_title(condition)
        axis.axhline(GOAL, color="grey", linewidth=0.5, linestyle=":")
    figure.supxlabel("batch")
    figure.supylabel("mean reward (5 batches)")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(METHODS))
    figure.savefig(path, dpi=110)


def smooth(rewards: Sequence[float]) -> list[float]:
    """Mean of the last five."""
    return [statistics.fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
