"""Trains in an environment with random faults, and counts what became of its episodes.

    python -m benchmarks.episodes --steps 5 --groups 50 [--seed 1]

Of 100 episodes that begin, on average two fail in `reset`, one hangs there with a process that it started,
one ends its process there, and two leave a daemon behind. The environment writes down what it did to each
episode, so that the counts of the run can be compared with it. A whole episode scores 1 or 2, however busy
the machine is: any smaller score would be that of an episode that failed, or got no processor.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

#: What becomes of an episode, and how often; those that are excluded come first.
FATES = {"fails": 0.02, "hangs": 0.01, "dies": 0.01, "leaves a daemon": 0.02}
EXCLUDED = ("fails", "hangs", "dies")
#: Variables with the file of fates, and the seed of the draws.
FATES_FILE, SEED = "RLCTL_EPISODES_FILE", "RLCTL_EPISODES_SEED"


def fate_of(number: int) -> str:
    """What becomes of the episode with this number."""
    draw = random.Random(f"{os.environ[SEED]}/{number}").random()
    for fate, probability in FATES.items():
        if draw < probability:
            return fate
        draw -= probability
    return "is whole"


class Unreliable:
    """The built-in task in two tries."""

    def reset(self, ground_truth: str, prompt: list) -> None:
        self.right, self.question = ground_truth, prompt[-1]["content"]
        self.tries, self.is_right = 0, False
        with Path(os.environ[FATES_FILE]).open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            fate = fate_of(len(file.readlines()))
            file.write(f"{fate}\n")
        if fate == "fails":
            raise ConnectionError("refused")
        if fate == "hangs":
            subprocess.run(["sleep", "86400"], check=False)
        if fate == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == "leaves a daemon":
            subprocess.run(["setsid", "--fork", "sleep", "86400"], check=False)

    def respond(self, text: str) -> str | None:
        self.tries += 1
        self.is_right = text == self.right
        return None if self.is_right or self.tries == 2 else self.question

    def get_reward(self) -> float:
        return 1.0 + self.is_right


def overrides(steps: int, groups: int, n: int, limit: str) -> list[str]:
    """Settings of the run, for `rlctl train`."""
    return [
        f"environment.name={Path(__file__).resolve()}:Unreliable",
        f"environment.variables=[{FATES_FILE},{SEED}]",
        "environment.context_length=24",
        f"environment.tool_timeout={limit}",
        "environment.max_retries=0",
        "reward.terms=[]",
        f"data.train_batch_size={groups}",
        f"actor.ppo_mini_batch_size={groups}",
        f"rollout.n={n}",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=-1",
        "trainer.logger=[]",
    ]


def processes_of(run_dir: Path) -> list[int]:
    """Processes that still have the file of the run's fates in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(run_dir).encode() in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def report(run_dir: Path, fates: Path) -> dict[str, object]:
    """What the run counted, beside what the environment did."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]
    rows = [line for line in lines if "episode/num_failed" in line]
    did = Counter(fates.read_text("utf-8").split("\n")[:-1])
    return {
        "steps": len(rows),
        "episodes": did.total(),
        "did": dict(did),
        "excluded": sum(did[fate] for fate in EXCLUDED),
        "counted_as_failed": int(sum(row["episode/num_failed"] for row in rows)),
        "smallest_score": min(row["critic/score/min"] for row in rows),
        "longest_step_s": max(row["timing_s/step"] for row in rows),
    }


def is_exact(found: dict[str, object], steps: int, episodes: int) -> bool:
    """Whether all steps were made, all faults were counted, and none was scored."""
    return (
        (found["steps"], found["episodes"]) == (steps, episodes)
        and found["counted_as_failed"] == found["excluded"]
        and float(str(found["smallest_score"])) >= 1.0
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--groups", type=int, default=50)
    options.add_argument("--n", type=int, default=8, help="episodes of a group")
    options.add_argument("--limit", default="30s", help="time limit of `reset`")
    options.add_argument("--seed", default="1", help="of the faults")
    options.add_argument("--dir", type=Path, default=Path("runs/episodes"))
    given = options.parse_args()
    run_dir = given.dir.resolve()
    fates = run_dir.with_name(f"{run_dir.name}-fates")
    fates.unlink(missing_ok=True)
    fates.parent.mkdir(parents=True, exist_ok=True)
    settings = overrides(given.steps, given.groups, given.n, given.limit)
    words = [sys.executable, "-m", "rlctl", "train", f"trainer.run_dir={run_dir}", *settings]
    begun = time.monotonic()
    subprocess.run(words, env=os.environ | {FATES_FILE: str(fates), SEED: given.seed}, check=True)
    found = report(run_dir, fates) | {"seconds": round(time.monotonic() - begun, 1)}
    found["processes_left"] = len(processes_of(fates))
    print(json.dumps(found, indent=1))
    exact = is_exact(found, given.steps, given.steps * given.groups * given.n)
    sys.exit(not (exact and found["processes_left"] == 0))


if __name__ == "__main__":
    main()
