"""Training in a user's environment: whole runs of the built-in model."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from tests import runs

CODE = """
    import os, pathlib

    class TwoTries:
        def reset(self, ground_truth: str, prompt: list, index: int) -> None:
            self.right, self.question = ground_truth, prompt[-1]["content"]
            self.num_answers, self.score = 0, 0.0
            mark = pathlib.Path(__file__).with_name(f"failed-{index}")
            if FAILS and index % 5 == 0 and not mark.exists():  # once for each row
                mark.touch()
                raise ConnectionError("refused")

        def respond(self, text: str) -> str | None:
            self.num_answers += 1
            if text == self.right:
                self.score = 1.0 / self.num_answers
            return None if self.score or self.num_answers == 2 else self.question

        def get_reward(self) -> float:
            return self.score
"""


def options(folder: Path, *, fails: bool = False) -> tuple[str, ...]:
    file = folder / "tries.py"
    file.write_text(f"FAILS = {fails}\n{dedent(CODE)}")
    return (
        f"environment.name={file}:TwoTries",
        "environment.context_length=24",
        "environment.lockstep=true",
        "reward.terms=[]",
        "trainer.logger=[]",
    )


def reproducible(run: Path) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if not key.startswith("episode/seconds")}
        for line in runs.reproducible(run)
    ]


def test_a_resumed_run_in_lockstep_is_bitwise_the_same(tmp_path: Path, embedded: Path) -> None:
    given = (*options(tmp_path), "trainer.save_freq=2")
    whole = runs.train(tmp_path / "whole", *given, "trainer.total_training_steps=4")
    run = runs.train(tmp_path / "run", *given, "trainer.total_training_steps=2")
    job = runs.resume(run, "trainer.total_training_steps=4")
    assert job.wait() == 0, job.output[-4000:]
    assert reproducible(run) == reproducible(whole)
    lines = runs.metrics(whole)
    assert all(0.0 < line["critic/score/mean"] < 1.0 for line in lines)
    assert all(1.0 < line["episode/num_turns/mean"] < 2.0 for line in lines)
    assert all(line["episode/num_failed"] == 0.0 for line in lines)
    assert {"rollout_corr/turn_1/kl", "rollout_corr/turn_2/kl", "episode/stop/completed"} <= lines[-1].keys()


def test_faults_are_counted_and_training_goes_on(tmp_path: Path, embedded: Path) -> None:
    run = runs.train(tmp_path / "run", *options(tmp_path, fails=True), "trainer.total_training_steps=3")
    lines = runs.metrics(run)
    failed = sum(line["episode/num_failed"] for line in lines)
    assert failed == len(list(tmp_path.glob("failed-*"))) > 0
    assert all(line["rollout_corr/skipped_updates"] == 0.0 for line in lines)
    assert all(line["critic/score/mean"] > 0.0 for line in lines)
