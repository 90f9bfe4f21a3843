"""Plots one run of a task with its evaluations: the picture of README.

    python benchmarks/first_task.py RUN BEFORE AFTER --out FILE.svg

RUN is a directory of `rlctl train`; BEFORE and AFTER are those of `rlctl evaluate` on held-out questions.
Shown are the mean reward of each step's batch (dots), its mean over five steps with a 95 % interval (by
Student's t; a trend within the five widens it), and the held-out score with the interval of `evaluate`.
Needs matplotlib (`pip install "rlctl[bench]"`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.intervals import mean_interval
from benchmarks.plot_runs import REWARD, series

TRAINING, HELD_OUT = "#00756a", "#b46a00"
WINDOW = 5  # steps


def windows(steps: list[int], rewards: list[float]) -> list[tuple[float, float, float, float]]:
    """Middle step of each window, mean reward, and the bounds of its interval."""
    return [
        (
            (steps[first] + steps[first + WINDOW - 1]) / 2,
            *mean_interval(rewards[first : first + WINDOW]),
        )
        for first in range(len(steps) - WINDOW + 1)
    ]


def held_out(evaluation: Path) -> tuple[float, float, float]:
    """Share of right answers on the held-out questions, and its interval."""
    results = json.loads((evaluation / "results.json").read_text(encoding="utf-8"))
    figure = results["scores"][-1]["avg"]
    return figure["value"], figure["low"], figure["high"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("before", type=Path, metavar="BEFORE")
    parser.add_argument("after", type=Path, metavar="AFTER")
    parser.add_argument("--out", type=Path, required=True, help="SVG, PNG or PDF, by its suffix")
    options = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "rlctl", "font.size": 10}
    from matplotlib import pyplot as plt

    steps, rewards = series(options.run, REWARD)
    middles, means, lows, highs = zip(*windows(steps, rewards), strict=True)
    figure, axis = plt.subplots(figsize=(8.2, 3.2), layout="constrained")
    axis.plot(steps, rewards, ".", color=TRAINING, alpha=0.35, markeredgewidth=0)
    axis.fill_between(middles, lows, highs, color=TRAINING, alpha=0.18, linewidth=0)
    axis.plot(middles, means, color=TRAINING, linewidth=1.8)
    before, after = held_out(options.before), held_out(options.after)
    for step, (score, low, high) in ((0, before), (steps[-1] + 1, after)):
        error = [[score - low], [high - score]]
        axis.errorbar(step, score, error, color=HELD_OUT, fmt="o", capsize=4, linewidth=1.6)
    middle = len(means) // 2
    axis.text(middles[middle], lows[middle] - 0.05, "reward of the batch", color=TRAINING, va="top")
    axis.text(-0.2, before[2] + 0.03, "held out,\nbefore", color=HELD_OUT)
    axis.text(steps[-1] + 0.6, after[2] + 0.02, "held out, after", color=HELD_OUT, ha="right")
    axis.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1.05), xlim=(-1, steps[-1] + 2))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, linewidth=0.5)
    metadata = {"Date": None} if options.out.suffix == ".svg" else None
    figure.savefig(options.out, metadata=metadata, dpi=130)


if __name__ == "__main__":
    main()
