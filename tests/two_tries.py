"""A user's environment for whole runs of the built-in model: its task in two tries."""

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
            if FAILS and index % 5 == 0:  # once for each row, whose siblings begin at the same time
                try:
                    mark.touch(exist_ok=False)
                except FileExistsError:
                    return
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
    """Settings of a run in lockstep; with `fails`, every fifth row fails once."""
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
    """The metrics that the times of the environment do not change."""
    return [
        {key: value for key, value in line.items() if not key.startswith("episode/seconds")}
        for line in runs.reproducible(run)
    ]
