"""Runs many short training runs in parallel, in separate processes, and stores their results.

A fork server imports torch, transformers and DeepSpeed once. Every run is a fork of it and trains with the
normal code path (`run_rank`, which `rlctl train` calls for one rank). Finished runs are lines of a JSON file,
so an interrupted study can continue.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.intervals import mean_interval

ROOT = Path(__file__).parents[1]
REWARD = "critic/score/mean"
VALIDATION = re.compile(r"val/.+/reward_mean")
#: Metrics stored per run: means over its steps; for seconds the median, because the machine's load varies.
KEPT = {
    "raw_ess": "rollout_corr/rollout_is_raw_eff_sample_size",
    "masked": "rollout_corr/rollout_rs_masked_fraction",
    "kl": "rollout_corr/k3_kl",
    "staleness": "training/staleness_mean",
    "mixed": "age/mixed_episodes",
    "step_s": "timing_s/step",
    "alarms": "guardrails/alarms",
    "interventions": "guardrails/interventions",
    "skipped": "guardrails/skipped",
}
#: Metrics stored per step.
SERIES = {
    "paid": "filter_groups/tokens_generated",
    "length": "response_length/mean",
    "score_paid": "filter_groups/score_mean",
    "step_s": "timing_s/step",
}
#: Modules that a run imports.
PRELOADED = (
    "rlctl.train.setup",
    "rlctl.train.loop",
    "deepspeed",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
)
WINDOW = 5  # number of steps over which rewards are averaged


@dataclass(frozen=True, slots=True)
class Job:
    """One run: its name in the table, and its spec."""

    study: str
    name: str
    seed: int
    presets: tuple[str, ...]
    overrides: tuple[str, ...]

    @property
    def key(self) -> str:
        """Key of a finished run: everything that affects its results."""
        return json.dumps([self.study, self.name, self.seed, self.presets, self.overrides])


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run.

    Attributes:
        rewards: mean reward of every step.
        means: means of the metrics in `KEPT` over the steps.
        error: why the run ended early; empty if it did not.
        validation: mean validation reward of the final policy; None if the run did not validate at its end.
        series: values per step of the metrics in `SERIES` and of `validation`; None if not logged.
    """

    rewards: list[float]
    means: dict[str, float] = field(default_factory=dict)
    error: str = ""
    validation: float | None = None
    series: dict[str, list[float | None]] = field(default_factory=dict)

    @property
    def first(self) -> float:
        """Mean reward of the first steps."""
        return statistics.fmean(self.rewards[:WINDOW])

    @property
    def last(self) -> float:
        """Mean reward of the last steps."""
        return statistics.fmean(self.rewards[-WINDOW:])

    def reached(self, goal: float) -> int | None:
        """First step at which the mean reward of the last `WINDOW` steps is at least `goal`."""
        sums = (statistics.fmean(self.rewards[i - WINDOW : i]) for i in range(WINDOW, len(self.rewards) + 1))
        return next((i + WINDOW for i, mean in enumerate(sums) if mean >= goal), None)


def run_all(
    jobs: Iterable[Job], memory: Path, workers: int, more: tuple[str, ...] = ()
) -> dict[Job, Outcome]:
    """Returns the outcome of every job: from `memory` if stored, otherwise runs the job and stores it.

    `more` are overrides that do not affect results, such as addresses.
    """
    known = _read(memory)
    jobs = list(jobs)
    waiting = [job for job in jobs if job.key not in known]
    if waiting:
        context = fork_server()
        done, start = 0, time.perf_counter()
        with ThreadPoolExecutor(workers) as threads:
            for job, outcome in zip(
                waiting, threads.map(lambda job: _run(context, job, more), waiting), strict=True
            ):
                known[job.key] = outcome
                with memory.open("a") as file:
                    file.write(json.dumps({"key": job.key, "outcome": asdict(outcome)}) + "\n")
                done += 1
                left = (time.perf_counter() - start) / done * (len(waiting) - done)
                end = f"{outcome.last:.2f}" if outcome.rewards else "—"
                what = f"{job.study} {job.name} seed {job.seed}: {end} {outcome.error[:60]}"
                print(f"{done}/{len(waiting)} {what} ({left / 60:.0f} min left)", file=sys.stderr, flush=True)
    return {job: known[job.key] for job in jobs}


def _read(memory: Path) -> dict[str, Outcome]:
    if not memory.exists():
        return {}
    rows = (json.loads(line) for line in memory.read_text().splitlines())
    return {row["key"]: Outcome(**row["outcome"]) for row in rows}


def fork_server() -> Any:
    """A multiprocessing context whose processes are forks of a server that has imported the libraries."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _run(context: Any, job: Job, more: tuple[str, ...]) -> Outcome:
    with tempfile.TemporaryDirectory() as where:
        run_dir = Path(where) / "run"
        process = context.Process(target=_train, args=(replace(job, overrides=job.overrides + more), run_dir))
        process.start()
        process.join()
        metrics = run_dir / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        error_file = run_dir / "error"
        error = error_file.read_text() if error_file.exists() else ""
    steps = [row for row in rows if row["step"] > 0]
    middle = {name: statistics.median if name == "step_s" else statistics.fmean for name in KEPT}
    means = {name: middle[name](row.get(key, 0.0) for row in steps) for name, key in KEPT.items() if steps}
    if process.exitcode and not error:
        error = f"exit code {process.exitcode}"
    series = {name: [row.get(key) for row in steps] for name, key in SERIES.items()}
    found = [[value for key, value in row.items() if VALIDATION.fullmatch(key)] for row in steps]
    series["validation"] = [values[0] if values else None for values in found]
    final = series["validation"][-1] if found and not error else None
    return Outcome([row[REWARD] for row in steps], means, error, final, series)


def _train(job: Job, run_dir: Path) -> None:
    """In the child: trains a job, without output."""
    from rlctl.run_spec.load import dump_spec, load_spec

    own = (f"trainer.seed={job.seed}", "trainer.rollouts_per_step=0", "trainer.max_ckpt_to_keep=1")
    spec = load_spec(list(job.presets), [], [*job.overrides, *own]).spec
    run_dir.mkdir(parents=True)
    train_one_rank(dump_spec(spec), run_dir, Path(os.devnull))


def train_one_rank(spec: str, run_dir: Path, log: Path, prepare: Callable[[], object] | None = None) -> None:
    """In a child: trains like `rlctl train` on one rank; an error that ends the run is in its file `error`.

    Args:
        spec: YAML.
        log: gets what the process prints.
        prepare: called before the training, e.g. to plant a fault.
    """
    import torch

    from rlctl.errors import RlctlError
    from rlctl.train.start import run_rank

    torch.set_num_threads(1)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    if prepare:
        prepare()
    try:
        run_rank(spec, str(run_dir), False)
    except RlctlError as error:  # a run that the trainer stopped is also a result
        (run_dir / "error").write_text(str(error))


def interval(values: np.ndarray) -> str:
    """Formats the mean and its 90 % interval by Student's t."""
    mean, low, high = mean_interval(values.tolist(), 0.9)
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"
