"""Compares a training step in a user's class with the same step in the shipped game.

    python -m benchmarks.user_class [--rounds 3] [--steps 8] [--fresh]

Both sides play `guess_number` with the model that rlctl builds for it: 28 prompts x 16 episodes a step. One
side is the shipped environment, in the trainer's process; the other one is the same class in a file of its
own, in worker processes. Sides alternate, each in a process of its own; the ratio of each round is that of
the medians of their steps behind the first three, in which workers start. On a machine that others use the
processor seconds of a step say more: those of all processes of a run, less those of a run of three steps.
`--fresh` adds a side with a process for every episode.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rlctl.environment import guess_number
from rlctl.tiny.game import ensure_game

WARM_UP = 3
#: What is shown of each side, means per episode.
SECONDS = ("policy", "waiting", "environment", "machinery")


def write_class(folder: Path) -> str:
    """The name of the shipped game's class in a file of a user."""
    names = {name: getattr(guess_number, name) for name in ("MAX_GUESSES", "HIGHER", "LOWER")}
    lines = [f"{name} = {value!r}" for name, value in names.items()]
    file = folder / "game.py"
    file.write_text("\n".join(lines) + "\n\n" + inspect.getsource(guess_number.GuessNumber))
    return f"{file}:GuessNumber"


def run(run_dir: Path, steps: int, *settings: str) -> dict[str, float]:
    """Median of the seconds of a step, its processor seconds, and means of an episode's seconds."""
    short, _ = _trained(run_dir.with_name(f"{run_dir.name}-short"), 0, *settings)
    long, rows = _trained(run_dir, steps, *settings)
    means = {key: statistics.fmean(row[f"episode/seconds/{key}"] for row in rows) for key in SECONDS}
    step = statistics.median(row["timing_s/step"] for row in rows)
    return {"step": step, "processor": (long - short) / steps, **means}


def _processor_seconds() -> float:
    """Of all processes that have ended, and whose parents have waited for them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _trained(run_dir: Path, steps: int, *settings: str) -> tuple[float, list[dict[str, float]]]:
    """Processor seconds of a run, and the metrics of its steps behind the warm-up."""
    words = [sys.executable, "-m", "rlctl", "train", "-p", "guess-number", f"trainer.run_dir={run_dir}"]
    words += [f"trainer.total_training_steps={WARM_UP + steps}", "trainer.save_freq=-1", "trainer.logger=[]"]
    game = ensure_game(1)
    words += [f"model.path={game.model_dir}", f"data.train_files={game.train_file}"]
    environment, begun = os.environ | {"OMP_NUM_THREADS": "1"}, _processor_seconds()
    subprocess.run([*words, *settings], env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    return _processor_seconds() - begun, [line for line in lines if "timing_s/step" in line][WARM_UP:]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--fresh", action="store_true")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        name = write_class(Path(folder))
        sides = {"shipped": [], "class": [f"environment.name={name}"]}
        if given.fresh:
            sides["fresh"] = [*sides["class"], "environment.fresh_process=true"]
        for turn in range(given.rounds):
            for side, settings in sides.items():
                one = run(Path(folder) / f"{side}-{turn}", given.steps, *settings)
                found.setdefault(side, []).append(one)
                print(
                    turn + 1, f"{side:>8}", *(f"{key} {value:.4f}" for key, value in one.items()), flush=True
                )
    for side in list(sides)[1:]:
        for key in ("step", "processor"):
            pairs = zip(found[side], found["shipped"], strict=True)
            ratios = [ours[key] / shipped[key] for ours, shipped in pairs]
            print(f"{side}: {key} seconds over the shipped game's:", *(f"{ratio:.2f}" for ratio in ratios))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
