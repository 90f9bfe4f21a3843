"""Tables and plot of `off_policy.py`: every method at its best rate, and all pairs of methods."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.intervals import holm, mean_interval, p_different, p_not_equivalent
from benchmarks.runs import Outcome
from benchmarks.studies.off_policy import FRESH, MARGIN, METHODS, PRECISION, RATES, Rates, final_reward

#: Family-wise error rate of one table of comparisons.
ALPHA = 0.05

Table = dict[tuple[str, str], list[Outcome]]  # (condition, method) → outcomes by seed


def write_report(table: Table, rates: Rates, tuning: dict[tuple[str, str], list[float]], out: Path) -> None:
    """Writes `off_policy.md` and `off_policy.png` to `out`."""
    conditions = list(dict.fromkeys(condition for condition, _ in table))
    parts = ["Learning rates\n", rate_table(rates, tuning), "Final reward\n", result_table(table, rates)]
    for condition in conditions:
        if condition not in PRECISION:
            parts += [f"{condition}: row minus column\n", pair_table(table, condition)]
    if FRESH in conditions:
        parts += ["Less precise rollouts minus float32 ones\n", precision_table(table)]
    (out / "off_policy.md").write_text("\n".join(parts))
    plot(table, out / "off_policy.png")


def rate_table(rates: Rates, tuning: dict[tuple[str, str], list[float]]) -> str:
    """Final reward on the tuning seeds per learning rate, the chosen rate in bold."""
    lines = [
        f"| condition | method | {' | '.join(f'{rate:g}' for rate in RATES)} |",
        "|---|---|" + "---|" * len(RATES),
    ]
    for (condition, method), means in tuning.items():
        cells = [
            f"**{mean:.3f}**" if rate == rates[condition, method] else f"{mean:.3f}"
            for rate, mean in zip(RATES, means, strict=True)
        ]
        lines.append(f"| {condition} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def result_table(table: Table, rates: Rates) -> str:
    """One row per condition and method; brackets contain 95 % intervals over the seeds (Student's t)."""
    lines = [
        "| condition | method | rate | seeds | final reward | range of the seeds | raw ESS | masked |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (condition, method), runs in table.items():
        rewards = [final_reward(run) for run in runs]
        cells = [
            *(condition, method, f"{rates[condition, method]:g}", f"{len(runs)}", interval(rewards)),
            *(f"{min(rewards):.3f}–{max(rewards):.3f}", f"{mean(runs, 'raw_ess'):.3f}"),
            f"{mean(runs, 'masked'):.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def pair_table(table: Table, condition: str) -> str:
    """Paired differences of final reward, row minus column.

    Bold: significantly different; `=`: equivalent within `MARGIN`; both at `ALPHA` over all pairs of the
    table (Holm).
    """
    methods = [method for method in METHODS if (condition, method) in table]
    pairs = {
        (row, column): differences(table, (condition, row), (condition, column))
        for column, row in combinations(methods, 2)
    }
    different = holm({pair: p_different(values) for pair, values in pairs.items()})
    equal = holm({pair: p_not_equivalent(values, MARGIN) for pair, values in pairs.items()})
    lines = [f"| | {' | '.join(methods[:-1])} |", "|---|" + "---|" * (len(methods) - 1)]
    for row in methods[1:]:
        cells = []
        for column in methods[:-1]:
            pair = (row, column)
            text = interval(pairs[pair], sign="+") if pair in pairs else ""
            if pair in pairs and different[pair] < ALPHA:
                text = f"**{text}**"
            if pair in pairs and equal[pair] < ALPHA:
                text = f"{text} ="
            cells.append(text)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def precision_table(table: Table) -> str:
    """Final reward with less precise rollouts minus that with float32 rollouts, tested for equivalence."""
    cells = [cell for cell in table if cell[0] in PRECISION]
    found = {cell: differences(table, cell, (FRESH, cell[1])) for cell in cells}
    p_values = holm({cell: p_not_equivalent(values, MARGIN) for cell, values in found.items()})
    lines = [f"| rollouts | method | difference | TOST within ±{MARGIN}, p (Holm) |", "|---|---|---|---|"]
    for (condition, method), values in found.items():
        row = (condition, method, interval(values, sign="+"), f"{p_values[condition, method]:.3f}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def differences(table: Table, cell: tuple[str, str], other: tuple[str, str]) -> list[float]:
    """Final reward of one setting minus that of another, seed by seed."""
    return [final_reward(a) - final_reward(b) for a, b in zip(table[cell], table[other], strict=True)]


def interval(values: Sequence[float], sign: str = "") -> str:
    """Mean and its 95 % interval."""
    middle, low, high = mean_interval(values)
    return f"{middle:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def mean(runs: Sequence[Outcome], key: str) -> float:
    """Mean of a stored metric over steps and seeds."""
    return statistics.fmean(run.means[key] for run in runs)


def plot(table: Table, path: Path) -> None:
    """Plots the training reward, mean over the seeds, one panel per staleness."""
    from matplotlib import pyplot as plt

    conditions = list(dict.fromkeys(condition for condition, _ in table if condition not in PRECISION))
    figure, axes = plt.subplots(
        1, len(conditions), figsize=(max(6.5, 4.5 * len(conditions)), 3.8), sharey=True, layout="constrained"
    )
    for axis, condition in zip(np.atleast_1d(axes), conditions, strict=True):
        for number, method in enumerate(METHODS):
            if (condition, method) not in table:
                continue
            runs = table[condition, method]
            length = min(len(run.rewards) for run in runs)
            curves = np.array([smooth(run.rewards[:length]) for run in runs])
            color = f"C{number}"
            axis.plot(np.arange(1, length + 1), curves.mean(0), label=method, linewidth=1.4, color=color)
        axis.set_title(condition)
        axis.set_xlabel("batch")
    first = np.atleast_1d(axes)[0]
    first.set_ylabel("mean reward of the batch (5 batches)")
    figure.legend(*first.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(path, dpi=110)


def smooth(rewards: Sequence[float]) -> list[float]:
    """Moving average over the last five rewards."""
    return [statistics.fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
