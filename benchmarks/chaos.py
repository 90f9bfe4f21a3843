"""Compares runs that were killed by SIGKILL at random times and resumed with an uninterrupted run.

    python -m benchmarks.chaos --kills 50 --out chaos.json

Each kill is a separate run, killed at a uniformly drawn time: alternately two runs with the time counted from
their start and two from their first step; alternately only the launcher or every process. The run is resumed
immediately (or restarted if nothing was saved yet) and compared at its end.
Equal means: every step once and in order; all metrics and the trained weights identical bit for bit, except
times; on a GPU up to `TOLERANCE`, as sums in CUDA's backward passes (`index_select`) have no fixed order.
With `rollout.max_staleness`, the weights that sampled a batch depend on timing; with a vLLM server, rounding
depends on its batches. In these two modes only the steps are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil

STEPS = 6
RUN = (
    "--preset=rloo-seq-is",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=2",
    "trainer.test_freq=-1",
    "trainer.logger=[]",
    "trainer.rollouts_per_step=-1",
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_micro_batch_size_per_gpu=16",
    "actor.lr_scheduler_type=constant",
    "actor.lr_warmup_steps=0",
    "rollout.n=4",
)
MODES = {
    "one rank": ((), True),
    "two ranks": (("trainer.n_gpus_per_node=2",), True),
    "one step stale": (("rollout.staleness=1",), True),
    "asynchronous": (("rollout.max_staleness=1",), False),
    "vLLM server": (("rollout.name=vllm", "rollout.mode=server", "engine.dtype=fp32"), False),
}
TIMED = ("timing_s/", "perf/throughput", "perf/time_per_step", "perf/max_memory", "timestamp")
#: On a GPU, of metrics relative to their values, and of weights.
TOLERANCE = 1e-3
#: Seconds in which every process of a killed run must end.
GONE_S = 60.0


def start(*words: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "rlctl", "train", *words],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def family(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return found


def is_exact_here() -> bool:
    """Whether runs of this machine repeat bit for bit: those on a CPU do."""
    from rlctl.run_spec.machine import gpus, gpus_are_hidden

    return gpus_are_hidden() or not gpus()


def are_equal(got: object, expected: object, tolerance: float) -> bool:
    """Whether numbers differ by at most the tolerance (relative, above 1), and all else is the same."""
    if isinstance(got, dict) and isinstance(expected, dict):
        names = got.keys() == expected.keys()
        return names and all(are_equal(got[name], expected[name], tolerance) for name in got)
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(got, expected, strict=False)
        return len(got) == len(expected) and all(are_equal(*pair, tolerance) for pair in pairs)
    if isinstance(got, float) and isinstance(expected, float):
        both_nan = math.isnan(got) and math.isnan(expected)
        return both_nan or math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
    return got == expected


def weights_of(file: Path) -> dict[str, list[float]]:
    from safetensors.torch import load_file

    return {name: tensor.double().flatten().tolist() for name, tensor in load_file(file).items()}


def result(run: Path, *, is_exact: bool = True) -> dict[str, object]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]
    weights = run / f"checkpoints/step_{STEPS:06d}/model/model.safetensors"
    read = (lambda file: hashlib.sha256(file.read_bytes()).hexdigest()) if is_exact else weights_of
    return {
        "steps": [row["step"] for row in rows],
        "rows": rows,
        "weights": read(weights) if weights.is_file() else None,
    }


def await_first_step(run: Path, process: subprocess.Popen[bytes]) -> None:
    while not (run / "metrics.jsonl").is_file() and process.poll() is None:
        time.sleep(0.01)


def whole(run: Path, mode: tuple[str, ...]) -> tuple[float, float]:
    """Runs without a kill; returns seconds since the start and since the first step."""
    begun = time.monotonic()
    process = start(*RUN, *mode, f"trainer.run_dir={run}", log=run.with_suffix(".log"))
    await_first_step(run, process)
    stepped = time.monotonic()
    if code := process.wait():
        sys.exit(f"the run to compare with ended with {code}: see {run.with_suffix('.log')}")
    return time.monotonic() - begun, time.monotonic() - stepped


def killed(
    run: Path, mode: tuple[str, ...], after: float, *, stepping: bool, everyone: bool
) -> dict[str, object] | None:
    """Kills a run `after` seconds after its start or first step and resumes it; None if it had ended."""
    log = run.with_suffix(".log")
    process = start(*RUN, *mode, f"trainer.run_dir={run}", log=log)
    if stepping:
        await_first_step(run, process)
    time.sleep(after)
    if process.poll() is not None:
        return None
    for victim in family(process.pid) if everyone else [psutil.Process(process.pid)]:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    metrics = run / "metrics.jsonl"
    logged = metrics.read_text().count("\n") if metrics.is_file() else 0
    saved = sorted(path.name for path in (run / "checkpoints").glob("step_*[0-9]"))
    found = {
        "after_s": round(after, 2),
        "stepping": stepping,
        "everyone": everyone,
        "logged": logged,
        "saved": saved,
    }
    if not saved:
        shutil.rmtree(run, ignore_errors=True)
    words = ["--resume", str(run)] if saved else [*RUN, *mode, f"trainer.run_dir={run}"]
    found["exit_code"] = start(*words, log=log).wait()  # without delay: ranks of the killed run may be alive
    deadline = time.monotonic() + GONE_S
    while (left := family(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found | {"orphans": len(left)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--kills", type=int, default=50, help="kills of each kind of run")
    options.add_argument("--modes", default=",".join(MODES), help="kinds, separated by commas")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--dir", type=Path, default=Path("runs/chaos"))
    options.add_argument("--out", type=Path, default=Path("chaos.json"))
    chosen = options.parse_args()
    drawn, report, num_bad = random.Random(chosen.seed), {}, 0
    exact_here = is_exact_here()
    tolerance = 0.0 if exact_here else TOLERANCE
    for name in chosen.modes.split(","):
        mode, is_exact = MODES[name]
        if name == "vLLM server" and find_spec("vllm") is None:
            print(f"{name}: vLLM is not installed")
            continue
        place = (chosen.dir / name.replace(" ", "-")).resolve()
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        lasts = whole(place / "whole", mode)
        expected, kills = result(place / "whole", is_exact=exact_here), []
        for number in range(chosen.kills):
            run = place / f"killed-{number}"
            how = {"stepping": number % 4 >= 2, "everyone": number % 2 == 1}
            while (kill := killed(run, mode, drawn.uniform(0.0, lasts[how["stepping"]]), **how)) is None:
                shutil.rmtree(run)  # the run ended before the kill: draw again
            has_steps = (run / "metrics.jsonl").is_file()
            got = result(run, is_exact=exact_here) if has_steps else {"steps": []}
            same = got["steps"] == expected["steps"]
            if is_exact:
                same = are_equal(got, expected, tolerance)
            kill["equal"] = same and not kill["orphans"] and not kill["exit_code"]
            num_bad += not kill["equal"]
            kills.append(kill)
            print(f"{name} {number + 1}/{chosen.kills}: {json.dumps(kill)}", flush=True)
            if kill["equal"]:
                shutil.rmtree(run)
        good = sum(bool(kill["equal"]) for kill in kills)
        report[name] = {"kills": len(kills), "survived": good, "compared": is_exact, "each": kills}
        report[name] |= {"bit_identical": is_exact and exact_here, "tolerance": tolerance}
        print(f"{name}: {good} of {len(kills)} kills survived", flush=True)
    chosen.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(bool(num_bad))


if __name__ == "__main__":
    main()
