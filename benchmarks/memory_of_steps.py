"""Measures how the memory of a training process grows with its steps.

    python benchmarks/memory_of_steps.py [--steps 704] [--every 64] [--trace] [key=value …]

Trains the embedded model in this process. Every `--every` steps, after a garbage collection: resident memory,
what malloc has in use, and what it holds but does not use (Linux with glibc), all in MiB. `--trace` adds what
Python objects made since the first look hold by tracemalloc, which takes memory itself, and at the end the
lines of code whose objects grew most since the second look. The last line has the slope of each figure over
the second half of the run, with its 95 % interval.

A run collects the responses of `FLUSH_STEPS` steps before it writes them, so that memory goes up and down in
this period. Looks that are as far apart see the same amount of them; others see them as growth.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import psutil
from scipy.stats import t as student_t

sys.path.insert(0, str(Path(__file__).parent.parent))

from rlctl.cli.app import run
from rlctl.track.jsonl import JsonlSink
from rlctl.track.rollouts import FLUSH_STEPS

MIB = 2**20
SMALL = ("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=4", "trainer.test_freq=-1")
#: Fields of glibc's `struct mallinfo2`.
MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


def memory(traced: bool) -> dict[str, float]:
    """Figures of this process in MiB."""
    gc.collect()
    figures = {"resident": psutil.Process().memory_info().rss / MIB}
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Mallinfo2
        info = libc.mallinfo2()
        figures |= {"in use": (info.uordblks + info.hblkhd) / MIB, "free": info.fordblks / MIB}
    if traced:
        figures["python"] = tracemalloc.get_traced_memory()[0] / MIB
    return figures


def slopes(looks: list[tuple[int, dict[str, float]]]) -> dict[str, tuple[float, float]]:
    """KiB a step of each figure, and half its 95 % interval: least squares over the second half of looks."""
    half = looks[len(looks) // 2 :]
    steps = np.array([step for step, _ in half], dtype=float)
    found = {}
    for name in half[0][1]:
        values = np.array([figures[name] for _, figures in half])
        (slope, start), left = np.polyfit(steps, values, 1), max(1, len(half) - 2)
        errors = values - start - slope * steps
        deviation = np.sqrt((errors**2).sum() / left / ((steps - steps.mean()) ** 2).sum())
        found[name] = (1024 * slope, 1024 * deviation * float(student_t.ppf(0.975, left)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=11 * FLUSH_STEPS)
    parser.add_argument("--every", type=int, default=FLUSH_STEPS)
    parser.add_argument("--trace", action="store_true")
    arguments = parser.parse_args()
    looks: list[tuple[int, dict[str, float]]] = []
    snapshots: list[tracemalloc.Snapshot] = []
    log, output = JsonlSink.log, sys.stdout

    def log_and_look(self: JsonlSink, step: int, metrics: dict[str, float]) -> None:
        log(self, step, metrics)
        if step % arguments.every or not step:
            return
        looks.append((step, memory(arguments.trace and bool(looks))))
        print(
            step,
            *(f"{name} {value:.2f}" for name, value in looks[-1][1].items()),
            sep="  ",
            file=output,
            flush=True,
        )
        if arguments.trace and len(looks) == 1:  # not before, because imports would take minutes
            tracemalloc.start(5)
        elif arguments.trace and len(looks) == 2:
            snapshots.append(tracemalloc.take_snapshot())

    JsonlSink.log = log_and_look  # type: ignore[method-assign]
    with (
        tempfile.TemporaryDirectory() as directory,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        code = run(
            [
                *("train", "-p", "rloo-seq-is", *SMALL, "trainer.save_freq=-1"),
                f"trainer.total_training_steps={arguments.steps}",
                f"trainer.run_dir={directory}/run",
                *arguments.overrides,
            ]
        )
    if len(looks) < 4:  # half of them have no slope
        sys.exit(code)
    if snapshots:
        for line in tracemalloc.take_snapshot().compare_to(snapshots[0], "lineno")[:25]:
            print(line)
    rates = (f"{name} {slope:.2f} ± {error:.2f}" for name, (slope, error) in slopes(looks).items())
    print("KiB a step:", *rates, sep="  ")
    sys.exit(code)


if __name__ == "__main__":
    main()
