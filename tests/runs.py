"""Runs `rlctl` commands, each in a separate process, and reads the files of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq

from rlctl.processes import free_port
from tests.processes import Job, wait_for_all

#: A run of the embedded model in which π_θ differs from π_rollout: two mini-batches per batch, no warm-up.
SMALL = (
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_micro_batch_size_per_gpu=16",
    "actor.lr_warmup_steps=0",
    "rollout.n=4",
    "trainer.rollouts_per_step=-1",
    "trainer.test_freq=-1",
    # The embedded preset can change: tests pin the values that they depend on.
    "actor.lr=5e-4",
    "actor.lr_scheduler_type=constant",
)

#: Without a preset: a correction that has something to do.
CORRECTED = (
    "algorithm.rollout_correction.rollout_is=sequence",
    "algorithm.rollout_correction.loss_type=reinforce",
    "algorithm.rollout_correction.bypass_mode=true",
)


def start(
    *arguments: str, log: Path, env: dict[str, str] | None = None, before: Callable[[], None] | None = None
) -> Job:
    """Starts `rlctl ARGUMENTS`."""
    return Job(_rlctl, list(arguments), log=log, env=env, before=before)


def start_train(
    run_dir: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Job:
    """Starts a small run of the embedded model in `run_dir`; its output goes to `run_dir`.log."""
    log = run_dir.with_suffix(".log")
    given = ("train", f"trainer.run_dir={run_dir}", *_small(arguments))
    return start(*given, log=log, env=env, before=before)


def _small(arguments: tuple[str, ...]) -> tuple[str, ...]:
    has_preset = {"-p", "--preset", "-s", "--spec"} & set(arguments)
    return (*SMALL, *(() if has_preset else CORRECTED), *arguments)


def train(run_dir: Path, *arguments: str, env: dict[str, str] | None = None) -> Path:
    """Like `start_train`, and waits for the run, which must succeed; returns `run_dir`."""
    job = start_train(run_dir, *arguments, env=env)
    assert job.wait() == 0, job.output[-4000:]
    return run_dir


def resume(run_dir: Path, *arguments: str, before: Callable[[], None] | None = None) -> Job:
    return start(
        "train", "--resume", str(run_dir), *arguments, log=run_dir.with_suffix(".resumed.log"), before=before
    )


def start_ranks(
    run_dir: Path, count: int, *arguments: str, before: Callable[[], None] | None = None
) -> list[Job]:
    """Starts the run of `start_train` on several ranks, each with the environment that torchrun sets."""
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = []
    for rank in range(count):
        env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
        command = ["train", f"trainer.run_dir={run_dir}", f"trainer.n_gpus_per_node={count}"]
        log = run_dir.with_suffix(f".rank{rank}.log")
        jobs.append(Job(_rlctl, [*command, *_small(arguments)], log=log, env=env, before=before))
    return jobs


def train_on_ranks(
    run_dir: Path, count: int, *arguments: str, before: Callable[[], None] | None = None
) -> Path:
    jobs = start_ranks(run_dir, count, *arguments, before=before)
    codes = wait_for_all(jobs)
    assert codes == [0] * count, "\n".join(job.output[-4000:] for job in jobs)
    return run_dir


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """All complete lines of `metrics.jsonl`."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def reproducible(run_dir: Path) -> list[dict[str, float]]:
    """Metrics without those that depend on the clock and the machine's load."""
    timed = ("timing_s/", "perf/throughput", "perf/time_per_step", "perf/max_memory", "timestamp")
    return [
        {key: value for key, value in line.items() if not key.startswith(timed)} for line in metrics(run_dir)
    ]


def assert_close(ours: Path, theirs: Path, rel: float = 1e-4, skip: tuple[str, ...] = ()) -> None:
    """Asserts that metrics are equal up to rounding, with an absolute tolerance for values near 0."""
    a, b = reproducible(ours), reproducible(theirs)
    assert [line["step"] for line in a] == [line["step"] for line in b]
    for line, other in zip(a, b, strict=True):
        assert line.keys() == other.keys()
        for key, value in line.items():
            if not key.startswith(skip or ("\0",)):
                assert math.isclose(value, other[key], rel_tol=rel, abs_tol=rel / 10), (
                    line["step"],
                    key,
                    value,
                    other[key],
                )


def rollouts(run_dir: Path) -> list[dict[str, object]]:
    return [
        row
        for part in sorted((run_dir / "rollouts").glob("*.parquet"))
        for row in pq.read_table(part).to_pylist()
    ]


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if not path.is_symlink())


def _rlctl(arguments: list[str]) -> int:
    from rlctl.cli.app import run

    return run(arguments)
