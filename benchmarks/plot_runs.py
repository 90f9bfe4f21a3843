"""Plots runs step by step: reward, and effective sample size raw and applied.

    python benchmarks/plot_runs.py RUN… --out FILE.svg [--label TEXT …]

Each run is a directory of `rlctl train`. Thick lines are means over the last `SMOOTH` steps, thin ones the
values. Needs matplotlib (`pip install "rlctl[bench]"`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

REWARD = "critic/score/mean"
RAW_ESS = "rollout_corr/rollout_is_raw_eff_sample_size"
SMOOTH = 9
APPLIED_ESS = "rollout_corr/rollout_is_eff_sample_size"


def series(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """Steps at which a metric was logged, and its values."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [(row["step"], float(row[metric])) for row in rows if row["step"] > 0 and metric in row]
    return [step for step, _ in found], [value for _, value in found]


def smooth(values: list[float]) -> list[float]:
    """Means over the last `SMOOTH` values."""
    return [statistics.fmean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, help="SVG, PNG or PDF, by its suffix")
    parser.add_argument("--label", action="append", default=[], help="of each run, in order")
    options = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "rlctl", "font.size": 9}
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8.2, 3), sharex=True, layout="constrained")
    labels = options.label or [run.name for run in options.runs]
    for color, (run, label) in enumerate(zip(options.runs, labels, strict=True)):
        for axis, metric, style, what in (
            (axes[0], REWARD, "-", ""),
            (axes[1], RAW_ESS, "-", ", raw"),
            (axes[1], APPLIED_ESS, "--", ", applied"),
        ):
            steps, values = series(run, metric)
            if values:
                axis.plot(steps, values, color=f"C{color}", linewidth=0.6, alpha=0.3)
                look = {"color": f"C{color}", "linewidth": 1.6, "linestyle": style}
                axis.plot(steps, smooth(values), label=label + what, **look)
    for axis, title in zip(axes, ("reward of the batch", "effective sample size"), strict=True):
        axis.set(title=title, xlabel="step", ylim=(0, 1.03))
        axis.grid(alpha=0.25, linewidth=0.5)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    metadata = {"Date": None} if options.out.suffix == ".svg" else None
    figure.savefig(options.out, metadata=metadata, dpi=130)


if __name__ == "__main__":
    main()
