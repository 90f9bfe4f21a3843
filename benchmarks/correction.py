"""Compares the cost of rlctl's correction (weights, mask, all metrics of a batch) with verl 0.9's helper.

    python benchmarks/correction.py [--level token] [--json FILE] [--threads 1] [--repeats 15]

Both sides get the same float32 tokens, each in its own layout (flat, or padded), and the same rules (weights
truncated at 2 and normalised; token_k1 and
seq_max_k2 rejection), and both return Python numbers. Time: medians of alternating runs in one process. Extra
memory: increase of the process's peak resident set during the call, each side and size in a separate process
(the allocator is configured to return freed blocks, otherwise the peak would include memory of earlier
calls). Host transfers: calls that would wait for a GPU (`item`, `tolist`, truth value or conversion of a
tensor, indexing by a mask), counted by patching.

Without verl only rlctl is measured; `make verl` installs verl.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from rlctl.algos.correction import correct, correction_metrics, normalization_factor
from rlctl.algos.rules import CorrectionRules, RejectRule, WeightRule
from rlctl.algos.segments import Units, to_host
from tests.reference import verl_helper

SIZES = [(256, 1024), (1024, 4096)]
SIDES = ("rlctl", "verl")
REJECT_RULES = (
    RejectRule("token_k1", "k1", "none", math.log(0.6), math.log(1.6), "token"),
    RejectRule("seq_max_k2", "k2", "max", None, 2.5, "sequence"),
)
VERL_SETTINGS = {
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": True,
    "rollout_rs": "token_k1,seq_max_k2",
    "rollout_rs_threshold": "0.6_1.6,2.5",
}
Run = Callable[[], dict[str, float]]


def make_batch(batch: int, horizon: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random responses of different lengths, with log-ratios as large as those of a bf16 engine."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(batch, horizon, generator=generator) * 4
    train = rollout + 0.02 * torch.randn(batch, horizon, generator=generator)
    lengths = torch.randint(horizon // 4, horizon + 1, (batch, 1), generator=generator)
    return train, rollout, torch.arange(horizon) < lengths


def prepare(side: str, size: tuple[int, int], level: str) -> Run | None:
    """Returns a function that runs the correction once; None if verl is missing."""
    train, rollout, mask = make_batch(*size)
    weight = WeightRule(level, "truncate", 0.5, 2.0, True, "all", "verl")
    rules = CorrectionRules(weight, REJECT_RULES)
    if side == "rlctl":
        own, theirs, lengths = train[mask], rollout[mask], mask.sum(1)
        del train, rollout, mask

        def ours() -> dict[str, float]:
            found = correct(own, theirs, Units.of_responses(lengths), rules)
            host = to_host(found.sums)
            # The factor scales the gradient; the weights are not rescaled.
            return correction_metrics(host, rules) | {"factor": normalization_factor(host, rules)}

        return ours
    verl = verl_helper.load()
    if verl is None:
        return None
    mask_float = mask.float()

    def theirs() -> dict[str, float]:
        correct_with_verl = verl.compute_rollout_correction_and_rejection_mask
        return correct_with_verl(train, rollout, mask_float, rollout_is=level, **VERL_SETTINGS)[2]

    return theirs


def median_times(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Median seconds per call; sides alternate, so that changing machine load affects both."""
    taken: dict[str, list[float]] = {side: [] for side in runs}
    for repeat in range(repeats + 2):
        for side, run in runs.items():
            start = time.perf_counter()
            run()
            if repeat >= 2:  # the first two are warm-up
                taken[side].append(time.perf_counter() - start)
    return {side: statistics.median(times) for side, times in taken.items()}


def extra_memory(run: Run) -> float:
    """Increase of the process's peak resident set during one call, in MiB (Linux)."""
    run()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current value
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1])


@contextmanager
def counted_transfers():
    """Counts the calls that would make the host wait for a GPU."""
    names = ["item", "tolist", "__bool__", "__float__", "__int__", "numpy", "__getitem__"]
    original = {name: getattr(torch.Tensor, name) for name in names}
    count = [0]
    depth = [0]

    def patched(name: str):
        def call(self, *args):
            waits = name != "__getitem__" or getattr(args[0], "dtype", None) is torch.bool
            count[0] += waits and depth[0] == 0
            depth[0] += 1
            try:
                return original[name](self, *args)
            finally:
                depth[0] -= 1

        return call

    for name in names:
        setattr(torch.Tensor, name, patched(name))
    try:
        yield count
    finally:
        for name, method in original.items():
            setattr(torch.Tensor, name, method)


def memory_in_a_process(side: str, size: tuple[int, int], options: argparse.Namespace) -> float:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--memory-of", side, *map(str, size)]
    command += ["--level", options.level, "--threads", str(options.threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure(size: tuple[int, int], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    runs = {side: run for side in SIDES if (run := prepare(side, size, options.level))}
    found = {side: {"seconds": seconds} for side, seconds in median_times(runs, options.repeats).items()}
    for side, run in runs.items():
        with counted_transfers() as count:
            run()
        found[side]["host_transfers"] = count[0]
        found[side]["extra_mib"] = memory_in_a_process(side, size, options)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--level", choices=["token", "sequence"], default="sequence")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        side, *size = options.memory_of
        run = prepare(side, (int(size[0]), int(size[1])), options.level)
        assert run is not None
        print(extra_memory(run))
        return

    report = {}
    print(f"{'batch':>13} {'side':>6} {'ms':>9} {'extra MiB':>10} {'host transfers':>15}")
    for size in SIZES:
        name = f"{size[0]}×{size[1]}"
        found = report[name] = measure(size, options)
        for side, figures in found.items():
            ms, mib, transfers = figures["seconds"] * 1e3, figures["extra_mib"], figures["host_transfers"]
            print(f"{name:>13} {side:>6} {ms:9.2f} {mib:10.1f} {transfers:15d}")
        if "verl" in found:
            ratios = {key: found["rlctl"][key] / found["verl"][key] for key in ("seconds", "extra_mib")}
            report[name]["ratio"] = ratios
            print(f"{'':>13} {'ratio':>6} {ratios['seconds']:9.2f} {ratios['extra_mib']:10.2f}")
        else:
            print("verl is not installed (make verl)")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
