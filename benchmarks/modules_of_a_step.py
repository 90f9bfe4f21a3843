"""Counts the modules of rlctl that run in one training step, from sampling to the weight sync.

    python benchmarks/modules_of_a_step.py [--preset rloo-seq-is]

Trains three steps of the built-in model, and records in the last one which of rlctl's modules execute a
function: what is done or said only once is over by then. Each has a reason to run in every step (`REASONS`);
with a module that has none, the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import rlctl  # noqa: E402
from rlctl.train import loop  # noqa: E402

STEPS = 3
SMALL = {"data.train_batch_size": 8, "rollout.n": 2, "actor.ppo_mini_batch_size": 8, "trainer.logger": []}

#: module → why a plain step runs it.
REASONS = {
    "rlctl.algos.correction": "weights and masks of the tokens",
    "rlctl.algos.estimators": "advantages",
    "rlctl.algos.losses": "the policy gradient",
    "rlctl.algos.rules": "the correction and the loss that the spec names, as the algorithms read them",
    "rlctl.algos.segments": "sums over sequences, turns and episodes",
    "rlctl.algos.weights_and_criteria": "the correction weight that the preset names",
    "rlctl.batch": "the batch and its columns",
    "rlctl.data.prompts": "the prompts of the step",
    "rlctl.engine.deepspeed": "backward pass and optimizer step",
    "rlctl.engine.layout": "rows that the model reads",
    "rlctl.engine.log_probs": "log-probs and entropies from states",
    "rlctl.engine.policy_engine": "forward passes, and the weights to send",
    "rlctl.engine.ranks": "sums over ranks",
    "rlctl.environment.build": "who makes the episodes of a task",
    "rlctl.environment.single_turn": "episodes of one turn",
    "rlctl.episodes": "sampled episodes as flat columns",
    "rlctl.prefix": "a prompt is computed once for its responses",
    "rlctl.registry": "parts by the name in the spec",
    "rlctl.reward.build": "the terms of the reward",
    "rlctl.reward.graders": "the grader of the preset",
    "rlctl.reward.protocol": "a grader's inputs and results",
    "rlctl.reward.thoughts": "an answer inside the reasoning does not count",
    "rlctl.rollout.expected_weights": "a weight that is missing or of another shape is an error",
    "rlctl.rollout.hf": "sampling",
    "rlctl.rollout.protocol": "requests to an engine",
    "rlctl.rollout.seeds": "seeds that do not depend on the number of ranks",
    "rlctl.rollout.shared_engine": "one engine for the threads that sample",
    "rlctl.rollout.turn_checks": "a turn of an engine that breaks the protocol is an error",
    "rlctl.run_spec.run_spec": "numbers that follow from several keys",
    "rlctl.track.tracker": "the phase that is shown",
    "rlctl.train.capability": "capabilities that are on: the test of the sampler",
    "rlctl.train.deal": "mini-batches, micro-batches, and their ranks",
    "rlctl.train.guardrails": "the checks before an optimizer step",
    "rlctl.train.mini_batch": "the episodes of an optimizer step",
    "rlctl.train.objective": "the loss of a micro-batch",
    "rlctl.train.sample_and_grade": "the groups of the step",
    "rlctl.train.score_batch": "the batch with rewards, log-probs, advantages",
    "rlctl.train.settings": "what the loss needs; learning rates; what is due",
    "rlctl.train.step_metrics": "metrics and seconds",
    "rlctl.train.stop": "the watchdog is told the phase",
    "rlctl.train.stream": "the queue of sampled groups",
    "rlctl.train.sync": "weights to the rollout engine",
    "rlctl.train.terms": "a micro-batch as a term of the loss sees it",
    "rlctl.train.update": "the optimizer steps of a batch",
}


def modules(preset: str) -> set[str]:
    """Names of the modules that run in the last step, from sampling to the end of the sync."""
    running: set[str] = set()
    package = str(ROOT / "rlctl")

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            running.add(str(frame.f_globals.get("__name__")))

    begin, end = loop.sample_and_grade, loop.sync_weights

    def sample(run: Any, step: int, timer: Any) -> Any:
        if step == STEPS:
            threading.setprofile_all_threads(note) if sys.version_info >= (3, 12) else sys.setprofile(note)
        return begin(run, step, timer)

    def sync(run: Any, step: int, timer: Any) -> Any:
        try:
            return end(run, step, timer)
        finally:
            sys.setprofile(None)

    loop.sample_and_grade, loop.sync_weights = sample, sync
    with tempfile.TemporaryDirectory() as directory:
        values = SMALL | {"trainer.total_training_steps": STEPS, "trainer.run_dir": f"{directory}/run"}
        rlctl.train(rlctl.load_spec(preset, values | {"trainer.test_freq": -1}))
    return running


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="rloo-seq-is")
    names = sorted(modules(parser.parse_args().preset))
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {REASONS.get(name, 'no reason is known')}")
    print(f"{len(names)} modules")
    sys.exit(any(name not in REASONS for name in names))
