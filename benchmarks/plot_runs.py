"""Plots runs step by step: reward, and effective sample size raw and applied.

    python benchmarks/plot_runs.py RUN… --out FILE.svg [--label TEXT …]

Each run is a directory of `rlctl train`. Needs matplotlib (`pip install "rlctl[bench]"`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

REWARD = "critic/score/mean"
RAW_ESS = "rollout_corr/rollout_is_raw_eff_sample_size"
APPLIED_ESS = "rollout_corr/rollout_is_eff_sample_size"


def series(run: Path, metric: str) -> tuple[list[int], list[float]]:
    """Steps at which a metric was logged, and its values."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [(row["step"], float(row[metric])) for row in rows if row["step"] > 0 and metric in row]
    return [step for step, _ in found], [value for _, value in found]


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

    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 2.9), sharex=True, layout="constrained")
    labels = options.label or [run.name for run in options.runs]
    for color, (run, label) in enumerate(zip(options.runs, labels, strict=True)):
        left.plot(*series(run, REWARD), color=f"C{color}", linewidth=1.2, label=label)
        right.plot(*series(run, RAW_ESS), color=f"C{color}", linewidth=1, label=f"{label}: raw")
        applied = series(run, APPLIED_ESS)
        if applied[1]:
            right.plot(*applied, color=f"C{color}", linewidth=1.2, linestyle="--", label=f"{label}: applied")
    for axis, title in ((left, "mean reward of the batch"), (right, "effective sample size")):
        axis.set(title=title, xlabel="step", ylim=(0, 1.03))
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.legend(frameon=False, loc="lower right" if axis is left else "best", fontsize=8)
    figure.savefig(options.out, metadata={"Date": None} if options.out.suffix == ".svg" else None, dpi=130)


if __name__ == "__main__":
    main()
