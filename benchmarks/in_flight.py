"""Seconds per step and reward: in flight against synchronous and one batch ahead, with vLLM servers.

    python benchmarks/in_flight.py [--llm] [--seeds 1-3] [--steps 30] [--memory FILE] [KEY=VALUE …]

Trains the built-in model on `questions.py`, whose episodes have 1 to 40 turns, with one vLLM server on this
machine for all runs, with token weights, one run at a time, seed by seed, so that a load of the machine
affects all conditions. `--llm`: SmolLM2-135M-Instruct, episodes of 1 or 8 turns, 6 steps, without pacing.

Prints Markdown: seconds per step (mean over the steps after the first, then over seeds); the ratio to the
synchronous run of the same seed with its 95 % interval; mean reward over the last half of the steps and its
difference to that run with its interval; updates since an episode's first token; and the share of episodes
with tokens of several versions.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.intervals import mean_interval
from benchmarks.learning import seeds_of
from benchmarks.runs import Job, Outcome, run_all
from examples import sums
from rlctl.data.schema import write_rows
from rlctl.model_files import model_directory
from rlctl.rollout.build_vllm import replica_settings
from rlctl.rollout.replicas import Replicas
from rlctl.rollout.server_access import KEY
from rlctl.run_spec.load import load_spec
from rlctl.tiny.game import embedded_task

HERE, PRESET = Path(__file__).parent, "rloo-seq-is"
SHARED = (
    *("rollout.name=vllm", "rollout.mode=server", "rollout.n=4", "trainer.test_freq=-1"),
    *("actor.lr_warmup_steps=0", "environment.max_turns=40", "reward.terms=[]"),
    *("algorithm.rollout_correction.rollout_is=token", "rollout.server.start_timeout=900"),
    "algorithm.rollout_correction.rollout_is_batch_normalize=false",
)
TINY = (
    *(f"environment.name={HERE / 'questions.py'}:questions", "actor.lr=5e-4"),
    *("data.train_batch_size=16", "actor.ppo_mini_batch_size=16"),
)
LLM = (
    *(f"environment.name={HERE / 'questions.py'}:sums", "actor.lr=1e-5", "model.path=smollm2-135m"),
    *("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "actor.ppo_micro_batch_size_per_gpu=16"),
    *("data.max_prompt_length=64", "data.max_response_length=10", "engine.dtype=fp32"),
)
IN_FLIGHT = "rollout.in_flight=true"
CONDITIONS = {
    "synchronous": (),
    "one batch ahead": ("rollout.max_staleness=1",),
    "in flight": (IN_FLIGHT, "rollout.max_staleness=1"),
    "in flight, paced to 1 update": (
        *(IN_FLIGHT, "rollout.max_staleness=1", "rollout.max_age_updates=1", "rollout.beyond_max_age=pace"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-3"), help="1-3 or 1,4; at least two")
    parser.add_argument("--llm", action="store_true", help="SmolLM2-135M instead of the built-in model")
    parser.add_argument("--steps", type=int, help="30, or 6 with --llm")
    parser.add_argument("--memory", type=Path, default=Path("in_flight.jsonl"), help="finished runs")
    parser.add_argument("overrides", nargs="*", help="of every run")
    options = parser.parse_args()
    steps = f"trainer.total_training_steps={options.steps or (6 if options.llm else 30)}"
    conditions = {name: CONDITIONS[name] for name in list(CONDITIONS)[: 3 if options.llm else 4]}
    shared = (*SHARED, *(LLM if options.llm else TINY), steps)
    with running_server(shared, is_llm=options.llm) as server:
        outcomes = run_all(
            [
                Job("in flight", name, seed, (PRESET,), (*shared, *setting, *options.overrides))
                for seed in options.seeds
                for name, setting in conditions.items()
            ],
            options.memory,
            workers=1,
            more=server,
        )
    for job, outcome in outcomes.items():
        if outcome.error:
            raise SystemExit(f"{job.name}, seed {job.seed}: {outcome.error}")
    found = {name: [found for job, found in outcomes.items() if job.name == name] for name in conditions}
    base = found["synchronous"]
    print("| | s/step | ratio | reward | minus synchronous | age | mixed episodes |")
    print("|---|---|---|---|---|---|---|")
    for name, runs in found.items():
        ratio = difference = ""
        if runs is not base:
            logs = [math.log(_seconds(a) / _seconds(b)) for a, b in zip(runs, base, strict=True)]
            ratio = "{:.2f} [{:.2f}, {:.2f}]".format(*map(math.exp, mean_interval(logs)))
            minus = [_reward(a) - _reward(b) for a, b in zip(runs, base, strict=True)]
            difference = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*mean_interval(minus))
        means = [statistics.fmean(map(of, runs)) for of in (_seconds, _reward)]
        age, mixed = (statistics.fmean(run.means[key] for run in runs) for key in ("staleness", "mixed"))
        cells = (f"{means[0]:.2f}", ratio, f"{means[1]:.3f}", difference, f"{age:.2f}", f"{mixed:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


@contextlib.contextmanager
def running_server(shared: tuple[str, ...], *, is_llm: bool) -> Iterator[tuple[str, ...]]:
    """A server of the model, as a run in flight starts it; the settings with which runs use it."""
    os.environ |= {KEY: secrets.token_hex(32), "OMP_NUM_THREADS": "1"}  # a run has one thread, too
    with tempfile.TemporaryDirectory() as where:
        data = Path(where) / "train.parquet"
        write_rows(data, "train", sums.rows(sums.split()[0]))
        files = (f"data.train_files={data}",) if is_llm else ()
        spec = load_spec([PRESET], [], [*shared, *files, *CONDITIONS["in flight"]]).spec
        model = Path(model_directory(spec.model.path)) if is_llm else embedded_task(spec).model_dir
        servers = Replicas(replica_settings(spec), lambda: model, Path(where) / "logs")
        servers.start()
        try:
            weights = f"rollout.server.weights_dir={Path(where) / 'weights'}"
            yield f"rollout.server.urls=[{servers.urls[0]}]", weights, *files
        finally:
            servers.close()


def _seconds(run: Outcome) -> float:
    return statistics.fmean(value or 0.0 for value in run.series["step_s"][1:])


def _reward(run: Outcome) -> float:
    return statistics.fmean(run.rewards[len(run.rewards) // 2 :])


if __name__ == "__main__":
    main()
