"""Measures whether the embedded job learns, for several seeds, one after the other, with the command line.

    python benchmarks/learning.py [--seeds 1-5] [--json FILE] [KEY=VALUE …]

Runs `rlctl train --preset rloo-seq-is` with the given overrides and reads the run's files. Training seconds
are the sum over steps; process seconds include start-up and, for a new seed, building its model (warm start).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LEARNED = 0.85
WINDOW = 5  # steps averaged
COMMAND = [sys.executable, "-m", "rlctl", "train", "--preset", "rloo-seq-is"]
REWARD = "critic/score/mean"
RAW_ESS = "rollout_corr/rollout_is_raw_eff_sample_size"
COLUMNS = {
    "seed": "seed",
    "first": f"first {WINDOW}",
    "last": f"last {WINDOW}",
    "reached": f"≥ {LEARNED} at",
    "steps": "steps",
    "train_s": "training s",
    "cpu_s": "CPU s",
    "process_s": "process s",
    "min_ess": "min raw ESS",
}


def run(seed: int, overrides: list[str]) -> dict[str, Any]:
    """Trains one run; returns its results."""
    root = str(Path(__file__).parent.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    }
    with tempfile.TemporaryDirectory() as where:
        run_dir = Path(where) / "run"
        start, cpu = time.perf_counter(), os.times()
        command = [*COMMAND, f"trainer.seed={seed}", f"trainer.run_dir={run_dir}", *overrides]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        process_s = time.perf_counter() - start
        cpu_s = os.times().children_user - cpu.children_user
        if done.returncode:
            raise SystemExit(f"seed {seed}: exit code {done.returncode}\n{done.stderr[-3000:]}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["step"] > 0]
    rewards = [row[REWARD] for row in steps]
    means = [statistics.fmean(rewards[i : i + WINDOW]) for i in range(len(rewards) - WINDOW + 1)]
    reached = next((i + WINDOW for i, mean in enumerate(means) if mean >= LEARNED), None)
    return {
        "seed": seed,
        "first": means[0],
        "last": means[-1],
        "reached": reached,
        "steps": len(steps),
        "train_s": sum(row["timing_s/step"] for row in steps),
        "cpu_s": cpu_s,
        "process_s": process_s,
        "min_ess": min(row[RAW_ESS] for row in steps),
        "rewards": rewards,
    }


def cell(value: Any) -> str:
    if value is None:
        return "never"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def seeds_of(text: str) -> list[int]:
    """Parses seeds, for example `1-5` or `1,4,9`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-5"), help="1-5 or 1,4,9")
    parser.add_argument("--json", type=Path, help="write the figures, with every step's reward, to this file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    print("".join(f"{title:>13}" for title in COLUMNS.values()), flush=True)
    report = []
    for seed in options.seeds:
        found = run(seed, options.overrides)
        report.append(found)
        print("".join(f"{cell(found[name]):>13}" for name in COLUMNS), flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    worst = min(found["last"] for found in report)
    print(f"worst last {WINDOW}: {worst:.3f}")
    sys.exit(0 if worst >= LEARNED else 3)


if __name__ == "__main__":
    main()
