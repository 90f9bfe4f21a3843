"""Measures how well `rlctl diagnose RUN --plan` predicts seconds per step.

    python benchmarks/plan.py [--pairs 5] [--steps 16]

Each pair is a synchronous run of the embedded model, from which the plan is made, and one that samples one
batch ahead, one after the other. The engine waits as one on processors of its own would compute: a per step
of the longest response, b per token. Prints predicted and measured seconds (mean over steps without the
first two, and the last one, during which nothing is sampled) and the mean ratio with its 95 % interval over
pairs (Student's t).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pydantic import BaseModel

from benchmarks.intervals import mean_interval
from benchmarks.runs import fork_server
from rlctl.registry import ROLLOUT_ENGINES
from rlctl.run_spec.rollout import EngineCapabilities

#: Seconds per token of the longest response, and per token of the batch.
CASES = {"slow sampling": (0.3, 0.002), "slow training": (0.05, 0.0005)}


class Seconds(BaseModel, extra="forbid"):
    """Parameters of the engine."""

    a: float = 0.0
    """Seconds per token of the longest response."""
    b: float = 0.0
    """Seconds per token of the batch."""


@ROLLOUT_ENGINES.register(
    label="random tokens after a given time",
    capabilities=EngineCapabilities(
        starts_with_policy=True, checks_syncs=False, samples_while_training=frozenset({"colocated"})
    ),
    params=Seconds,
)
def waiting(context: Any) -> Any:
    """An engine that needs no processor of this machine: it waits and returns random tokens."""
    import numpy as np
    import torch

    from rlctl.batch import Turn

    size, seconds = context.model.config.vocab_size, context.params

    class Waiting:
        version = 0

        def sample(self, requests: Sequence[Any], sampling: Any) -> list[Turn]:
            turns = []
            for request in requests:
                draw = np.random.default_rng(request.seed)
                count = min(int(draw.geometric(0.4)), request.limit(sampling))
                ids = torch.from_numpy(draw.integers(3, size, count))
                log_probs = torch.full((count,), -float(np.log(size)))
                turns.append(Turn(ids, log_probs, torch.full((count,), self.version), "stop"))
            lengths = [len(turn.token_ids) for turn in turns]
            time.sleep(seconds.a * max(lengths, default=0) + seconds.b * sum(lengths))
            return turns

        def sync_weights(self, policy: Any, policy_version: int) -> None:
            for _ in policy.weights():
                pass
            self.version = policy_version

        def close(self) -> None:
            pass

    return Waiting()


def main() -> None:
    """Runs all pairs and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    given = parser.parse_args()
    context = fork_server()
    for name, (a, b) in CASES.items():
        ratios = []
        for pair in range(given.pairs):
            found = []
            for ahead in (0, 1):
                with tempfile.TemporaryDirectory() as where:
                    overrides = (
                        f"rollout.max_staleness={ahead}",
                        f"trainer.total_training_steps={given.steps}",
                        f"rollout.engine_params.a={a}",
                        f"rollout.engine_params.b={b}",
                    )
                    process = context.Process(target=_run, args=(overrides, Path(where)))
                    process.start()
                    process.join()
                    found.append(json.loads((Path(where) / "found.json").read_text()))
            synchronous, ahead_of = found
            predicted = synchronous["plan"]["modes"][1]["seconds"][0]
            ratios.append(predicted / ahead_of["measured"])
            print(
                f"{name}, pair {pair + 1}: synchronous {synchronous['measured']:.3f} s, one batch ahead "
                f"predicted {predicted:.3f} s, measured {ahead_of['measured']:.3f} s",
                flush=True,
            )
        mean, low, high = mean_interval(ratios) if len(ratios) > 1 else (ratios[0],) * 3
        print(f"{name}: predicted / measured {mean:.2f} ({low:.2f} to {high:.2f})")


def _run(overrides: tuple[str, ...], where: Path) -> None:
    """In the child: trains, and writes seconds per step and the plan."""
    import torch

    from rlctl.diagnose.plan import NEEDED, plan
    from rlctl.diagnose.readers.detect import read_run
    from rlctl.run_spec.load import dump_spec, load_spec
    from rlctl.train.start import run_rank

    torch.set_num_threads(1)
    log = os.open(where / "log", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    fixed = ("data.train_batch_size=64", "actor.ppo_mini_batch_size=16", "trainer.test_freq=-1")
    engine = f"rollout.name={Path(__file__)}:waiting"
    spec = load_spec(["rloo-seq-is"], [], [engine, "trainer.rollouts_per_step=0", *fixed, *overrides]).spec
    run_dir = where / "run"
    run_dir.mkdir()
    (run_dir / "spec.yaml").write_text(dump_spec(spec))
    run_rank(dump_spec(spec), str(run_dir), False)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    result: dict[str, Any] = {"measured": statistics.fmean(row["timing_s/step"] for row in rows[2:-1])}
    if not spec.rollout.max_staleness:
        result["plan"] = plan(read_run(run_dir, NEEDED)).as_document()
    (where / "found.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
