"""An environment of the built-in model whose episodes have very different lengths, for `in_flight.py`.

Most tasks ask one sum, some ask several, and a few ask many; between two questions a tool takes its time.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from rlctl.environment.protocol import Environment, EnvironmentContext, Outcome
from rlctl.registry import ENVIRONMENTS
from rlctl.tiny.embedded import problem

#: Number of questions of a task, by its row modulo the length of this list.
QUESTIONS = [1] * 16 + [4] * 3 + [40]
TOOL_S = 0.05


class Questions:
    """Each question is a sequence of its own; the reward is the share of right answers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def run(self, task: Any, sampler: Any) -> Outcome:
        """One episode."""
        draw, right, count = random.Random(task.row), 0, QUESTIONS[task.row % len(QUESTIONS)]
        ids, answer, text = list(task.prompt_ids), task.ground_truth, ""
        for number in range(count):
            if number:
                await asyncio.sleep(TOOL_S)
                question, answer = problem(draw.randrange(100), draw.randrange(100))
                ids = self._tokenizer(question)["input_ids"]
            turn = await sampler.sample(ids)
            text = self._tokenizer.decode(turn.token_ids, skip_special_tokens=True)
            right += text == answer
        return Outcome(text, reward=right / count)

    def close(self) -> None:
        """Has nothing to end."""


@ENVIRONMENTS.register(label="Sums, in episodes of very different lengths")
def questions(context: EnvironmentContext) -> Environment:
    """Of a tokenizer that renders a question as its characters."""
    return Questions(context.tokenizer)
