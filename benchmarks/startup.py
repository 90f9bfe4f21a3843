"""Measures the start-up time of `rlctl --help` and a dry run, compared with Python and imported libraries.

    python benchmarks/startup.py [--json FILE] [--repeats 15]

Starts whole processes alternately, so that changing machine load affects all of them; reports medians of wall
and user CPU seconds (wall times are reliable only on an idle machine). Uses the `rlctl` installed next to
this interpreter, if there is one. Byte code is cached, as for any installed program; the first round fills
the cache and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = Path(sys.executable).parent / "rlctl"
RLCTL = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "rlctl"]
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import typer": [sys.executable, "-c", "import typer"],
    "import torch": [sys.executable, "-c", "import torch"],
    "rlctl --help": [*RLCTL, "--help"],
    "rlctl train --dry-run": [*RLCTL, "train", "--preset", "rloo-seq-is", "--dry-run"],
}


def one_run(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall and user CPU seconds of one process."""
    start, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    return wall, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - cpu


def measure(repeats: int) -> dict[str, dict[str, float]]:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as cache:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        path = filter(None, [str(ROOT), environment.get("PYTHONPATH")])
        environment |= {"PYTHONPYCACHEPREFIX": cache, "PYTHONPATH": os.pathsep.join(path)}
        for repeat in range(repeats + 1):
            for name, command in COMMANDS.items():
                seconds = one_run(command, environment)
                if repeat:
                    taken[name].append(seconds)
    return {
        name: {
            "wall": statistics.median(wall for wall, _ in runs),
            "best wall": min(wall for wall, _ in runs),
            "cpu": statistics.median(cpu for _, cpu in runs),
        }
        for name, runs in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    report = measure(options.repeats)
    base = report["import typer"]["cpu"]
    print(f"{'seconds':>22} {'wall':>7} {'best':>7} {'CPU':>7} {'CPU / typer':>12}")
    for name, found in report.items():
        wall, best, cpu = found["wall"], found["best wall"], found["cpu"]
        print(f"{name:>22} {wall:7.3f} {best:7.3f} {cpu:7.3f} {cpu / base:12.1f}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
