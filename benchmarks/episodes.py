"""Trains in an environment of which 2 % of the episodes fail and 1 % hang, and counts what became of them.

    python -m benchmarks.episodes --steps 5 --groups 50

Of every 100 episodes that begin, two fail in `reset` and one hangs there with a process that it started. The
environment writes down what it did to each episode, so that the counts of the run can be compared with it. A
whole episode scores 1 or 2: any smaller score would be that of an episode that failed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

#: Places of 100 consecutive episodes, and what becomes of them; all others are whole.
FATES = {17: "fails", 42: "hangs", 71: "fails"}
#: Variable with the file of fates.
FATES_FILE = "RLCTL_EPISODES_FILE"


class Unreliable:
    """The built-in task in two tries."""

    def reset(self, ground_truth: str, prompt: list) -> None:
        self.right, self.question = ground_truth, prompt[-1]["content"]
        self.tries, self.is_right = 0, False
        with Path(os.environ[FATES_FILE]).open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            fate = FATES.get(len(file.readlines()) % 100, "is whole")
            file.write(f"{fate}\n")
        if fate == "fails":
            raise ConnectionError("refused")
        if fate == "hangs":
            subprocess.run(["sleep", "86400"], check=False)

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
        f"environment.variables=[{FATES_FILE}]",
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
        "failed": did["fails"],
        "hung": did["hangs"],
        "counted_as_failed": int(sum(row["episode/num_failed"] for row in rows)),
        "smallest_score": min(row["critic/score/min"] for row in rows),
        "longest_step_s": max(row["timing_s/step"] for row in rows),
    }


def is_exact(found: dict[str, object], steps: int, episodes: int) -> bool:
    """Whether all steps were made, all faults were counted, and none was scored."""
    return (
        (found["steps"], found["episodes"]) == (steps, episodes)
        and found["counted_as_failed"] == int(str(found["failed"])) + int(str(found["hung"]))
        and float(str(found["smallest_score"])) >= 1.0
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--groups", type=int, default=50)
    options.add_argument("--n", type=int, default=8, help="episodes of a group")
    options.add_argument("--limit", default="30s", help="time limit of `reset`")
    options.add_argument("--dir", type=Path, default=Path("runs/episodes"))
    given = options.parse_args()
    run_dir = given.dir.resolve()
    fates = run_dir.with_name(f"{run_dir.name}-fates")
    fates.unlink(missing_ok=True)
    fates.parent.mkdir(parents=True, exist_ok=True)
    settings = overrides(given.steps, given.groups, given.n, given.limit)
    words = [sys.executable, "-m", "rlctl", "train", f"trainer.run_dir={run_dir}", *settings]
    begun = time.monotonic()
    subprocess.run(words, env=os.environ | {FATES_FILE: str(fates)}, check=True)
    found = report(run_dir, fates) | {"seconds": round(time.monotonic() - begun, 1)}
    found["processes_left"] = len(processes_of(fates))
    print(json.dumps(found, indent=1))
    exact = is_exact(found, given.steps, given.steps * given.groups * given.n)
    sys.exit(not (exact and found["processes_left"] == 0))


if __name__ == "__main__":
    main()
