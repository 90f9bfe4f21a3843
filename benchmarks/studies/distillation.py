"""Measures on-policy distillation against reinforcement learning with the same number of sampled tokens.

    python benchmarks/studies/distillation.py [--seeds 1-3] [--where DIRECTORY] [--workers 1]

For every seed, the built-in model is trained by RL for 80 steps: the teacher. Then runs of 40 steps start
from the same initial model: with the teacher's KL alone, in the loss (preset `distill`) or in the reward, and
by RL without a teacher. All sample 64 prompts × 8 responses per step. Finished runs are kept in DIRECTORY:
an interrupted study continues. Prints the mean reward of the last responses up to some steps, the validation
reward of the final policies, and its difference to RL with a 95 % interval over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.intervals import mean_interval
from benchmarks.learning import seeds_of
from benchmarks.runs import WINDOW, Job, Outcome, run_all

STEPS = (10, 20, 40)
RL = "RL"
#: A smaller job than that of the embedded preset. Validation: 512 problems, 4 responses at temperature 1.
SIZE = ("data.train_batch_size=64", "actor.ppo_mini_batch_size=32", "actor.lr_warmup_steps=20")
COMMON = (
    *SIZE,
    f"trainer.total_training_steps={STEPS[-1]}",
    f"trainer.test_freq={STEPS[-1]}",
    "rollout.val_kwargs.n=4",
    "rollout.val_kwargs.temperature=1.0",
)
ARMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    RL: (("rloo-seq-is",), ()),
    "teacher in the loss": (("distill",), ()),
    "teacher in the reward": (("distill",), ("algorithm.teacher.kl_in=reward", "algorithm.teacher.top_k=64")),
}


def teacher_of(seed: int, where: Path) -> Path:
    """The model of a finished RL run of 80 steps; trains it if it is not there."""
    run = where / f"teacher-{seed}"
    if not (run / "summary.json").exists():
        command = [sys.executable, "-m", "rlctl", "train", "-p", "rloo-seq-is", *SIZE]
        own = (f"trainer.run_dir={run}", f"trainer.seed={seed}", "trainer.total_training_steps=80")
        subprocess.run([*command, *own, "trainer.rollouts_per_step=0"], check=True)
    return run / "checkpoints" / "latest" / "model"


def reward_after(outcome: Outcome, step: int) -> float:
    """Mean reward of the last steps up to this one."""
    return statistics.fmean(outcome.rewards[step - WINDOW : step])


def main() -> None:
    """Runs what is missing and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=[1, 2, 3])
    parser.add_argument("--where", type=Path, default=Path("distillation-runs"))
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    given.where.mkdir(parents=True, exist_ok=True)
    jobs = {}
    for seed in given.seeds:
        path = f"algorithm.teacher.path={teacher_of(seed, given.where).resolve()}"
        for arm, (presets, overrides) in ARMS.items():
            own = () if arm == RL else (path,)
            jobs[arm, seed] = Job("distillation", arm, seed, presets, (*COMMON, *own, *overrides))
    outcomes = run_all(jobs.values(), given.where / "outcomes.jsonl", given.workers)
    found = {key: outcomes[job] for key, job in jobs.items()}
    for (arm, seed), outcome in found.items():
        if outcome.error:
            sys.exit(f"{arm}, seed {seed}: {outcome.error}")
    print("| | " + " | ".join(f"after {step} steps" for step in STEPS) + " | validation | difference to RL |")
    print("|---|" + "---|" * (len(STEPS) + 2))
    for arm in ARMS:
        of_arm = [found[arm, seed] for seed in given.seeds]
        cells = [f"{statistics.fmean(reward_after(each, step) for each in of_arm):.3f}" for step in STEPS]
        cells.append(f"{statistics.fmean(each.validation or 0.0 for each in of_arm):.3f}")
        if arm == RL:
            cells.append("")
        else:
            pairs = [(found[arm, seed].validation, found[RL, seed].validation) for seed in given.seeds]
            mean, low, high = mean_interval([(ours or 0.0) - (rl or 0.0) for ours, rl in pairs])
            cells.append(f"{mean:+.3f} ({low:+.3f} to {high:+.3f})")
        print(f"| {arm} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
