"""Measures the CPU time of a training step, and by a profile that of the Python code per episode.

    python benchmarks/python_per_episode.py [CHECKOUT ...] [--rounds 3] [--steps 10] [--episodes 1024]
        [--top 0]

Trains the embedded model with the preset `rloo-seq-is` from each checkout (default: this one), every time in
a process of its own; checkouts alternate, round by round. All times are CPU time of one thread, because the
machine may be busy; the first two steps are not counted. A round consists of a run without and one with a
profile. The Python time per episode is that of sampling, grading, batching and the metrics of episodes
(`PER_EPISODE`) less that of the model itself (`MODEL`); the profile makes it larger. `--top` prints the
functions of the profile with the largest times of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: Functions called once a step whose time grows with the number of episodes: file and name.
PER_EPISODE = (
    ("train/sample_and_grade.py", "sample_and_grade"),
    ("train/step_metrics.py", "metrics_of_episodes"),
    ("train/score_batch.py", "train_batch"),
)
#: The model's own part of them: passes over shared beginnings, and the rest.
MODEL = (("rlctl/prefix.py", "shared_prefix"), ("transformers/generation/utils.py", "generate"))
#: Runs once a step.
GUARDRAILS = ("train/guardrails.py", "observe")
SAMPLES, WARM_UP = 8, 2


class Steps(list):
    """Replaces a run's history: records the CPU time at every step, starts a profile after warm-up."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        super().__init__()
        self.times: list[float] = []
        self.profile = profile

    def append(self, item: Any) -> None:
        super().append(item)
        self.times.append(time.process_time())
        if self.profile and len(self) == WARM_UP:
            self.profile.enable()


def cumulative(stats: pstats.Stats, function: tuple[str, str]) -> float:
    """Seconds in a function and what it calls.

    Raises:
        LookupError: it was never called.
    """
    file, name = function
    rows = stats.stats.items()
    seconds = [row[3] for (path, _, called), row in rows if called == name and path.endswith(file)]
    if not seconds:
        raise LookupError(f"{name} of {file} was not called in the profiled steps")
    return max(seconds)


def measure(steps: int, episodes: int, top: int, *, profiled: bool) -> dict[str, float]:
    """Trains once; milliseconds of CPU time per step, or from a profile per episode and in the guardrails."""
    import torch

    from rlctl.engine.ranks import join_ranks, leave_ranks
    from rlctl.run_spec.load import load_spec
    from rlctl.track.console import Startup
    from rlctl.train.loop import train
    from rlctl.train.setup import build
    from rlctl.train.stop import Watchdog, catching_signals

    torch.set_num_threads(1)
    prompts = episodes // SAMPLES
    overrides = [
        f"data.train_batch_size={prompts}",
        f"actor.ppo_mini_batch_size={prompts}",
        f"rollout.n={SAMPLES}",
        f"trainer.total_training_steps={steps + WARM_UP}",
        "trainer.logger=[]",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
    ]
    spec = load_spec(["rloo-seq-is"], [], overrides).spec
    profile = cProfile.Profile(time.process_time) if profiled else None
    ranks = join_ranks()
    with tempfile.TemporaryDirectory() as run_dir, catching_signals() as stop:
        watchdog = Watchdog(0, 1, Path(run_dir), timeout_s=1800.0)  # not started
        with contextlib.ExitStack() as stack:
            startup = Startup(is_shown=False)
            run = build(spec, Path(run_dir), ranks, stop, startup, watchdog, stack, resume=False)
            run.history = recorded = Steps(profile)
            train(run)
            if profile:
                profile.disable()
        leave_ranks()
    if not profile:
        return {"step_ms": 1e3 * (recorded.times[-1] - recorded.times[WARM_UP - 1]) / steps}
    stats = pstats.Stats(profile, stream=sys.stderr)
    if top:
        stats.sort_stats("tottime").print_stats(top)
        stats.sort_stats("cumulative").print_stats(r"rlctl/", top)
    python = sum(cumulative(stats, name) for name in PER_EPISODE)
    python -= sum(cumulative(stats, name) for name in MODEL)
    return {
        "episode_ms": 1e3 * python / steps / episodes,
        "guardrails_ms": 1e3 * cumulative(stats, GUARDRAILS) / steps,
    }


def measured_apart(checkout: Path, options: argparse.Namespace, *, profiled: bool) -> dict[str, float]:
    """The same in a process of its own, with the code of a checkout."""
    command = [sys.executable, __file__, "--child", *(["--profiled"] if profiled else [])]
    for name in ("steps", "episodes", "top"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="counted steps of a run")
    parser.add_argument("--episodes", type=int, default=1024, help="of a step, a multiple of 8")
    parser.add_argument("--top", type=int, default=0, help="print the largest functions of each profile")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.steps, options.episodes, options.top, profiled=options.profiled)))
        return
    checkouts = [checkout.resolve() for checkout in options.checkouts]
    runs: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in checkouts}
    for _ in range(options.rounds):
        for checkout in checkouts:
            whole = measured_apart(checkout, options, profiled=False)
            runs[checkout].append(whole | measured_apart(checkout, options, profiled=True))
    print("| checkout | CPU ms per step | Python ms per episode | guardrails ms per step |")
    print("|---|---|---|---|")
    for checkout, rows in runs.items():
        names = ("step_ms", "episode_ms", "guardrails_ms")
        step, episode, guardrails = (statistics.median(row[name] for row in rows) for name in names)
        print(f"| {checkout.name} | {step:.0f} | {episode:.3f} | {guardrails:.1f} |")


if __name__ == "__main__":
    main()
