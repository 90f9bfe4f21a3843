"""Environments whose episodes have very different lengths, for `in_flight.py`.

Most tasks ask one sum, some ask several, and a few ask many; between two questions a tool takes its time.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlctl.environment.protocol import Environment, EnvironmentContext, Outcome
from rlctl.registry import ENVIRONMENTS
from rlctl.tiny.embedded import problem


@dataclass(frozen=True, slots=True)
class Questions:
    """Each question is a sequence of its own; the reward is the share of right answers.

    Attributes:
        ask: draws a question; returns its token ids, and its answer.
        read: the answer in a text.
        counts: number of questions of a task, by its row modulo the length of this list.
        tool_s: seconds between two questions.
    """

    tokenizer: Any
    ask: Callable[[random.Random], tuple[list[int], str]]
    read: Callable[[str], str]
    counts: list[int]
    tool_s: float

    async def run(self, task: Any, sampler: Any) -> Outcome:
        """One episode."""
        draw, right, count = random.Random(task.row), 0, self.counts[task.row % len(self.counts)]
        ids, answer, text = list(task.prompt_ids), task.ground_truth, ""
        for number in range(count):
            if number:
                await asyncio.sleep(self.tool_s)
                ids, answer = self.ask(draw)
            turn = await sampler.sample(ids)
            text = self.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
            right += self.read(text) == answer
        return Outcome(text, reward=right / count)

    def close(self) -> None:
        """Has nothing to end."""


@ENVIRONMENTS.register(label="Sums of the built-in model, in episodes of very different lengths")
def questions(context: EnvironmentContext) -> Environment:
    """Of a tokenizer that renders a question as its characters."""
    tokenizer = context.tokenizer

    def ask(draw: random.Random) -> tuple[list[int], str]:
        question, answer = problem(draw.randrange(100), draw.randrange(100))
        return tokenizer(question)["input_ids"], answer

    return Questions(tokenizer, ask, str, [1] * 16 + [4] * 3 + [40], 0.05)


@ENVIRONMENTS.register(label="Sums phrased in words, in episodes of very different lengths")
def sums(context: EnvironmentContext) -> Environment:
    """Of a chat model; the last number of a reply is its answer."""
    from examples import sums as data

    tokenizer, rows = context.tokenizer, data.rows(data.split()[0])

    def ask(draw: random.Random) -> tuple[list[int], str]:
        row = draw.choice(rows)
        messages = [{"role": one.role, "content": one.content} for one in row.prompt]
        given: dict[str, Any] = {"add_generation_prompt": True, "return_dict": True}
        return tokenizer.apply_chat_template(messages, **given)["input_ids"], str(row.ground_truth)

    def read(text: str) -> str:
        numbers: list[str] = re.findall(r"-?\d+", text)
        return numbers[-1] if numbers else ""

    return Questions(tokenizer, ask, read, [1] * 3 + [8], 1.0)
