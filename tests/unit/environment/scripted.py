"""A sampler that says what a test tells it to, and records tokens as training does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import torch

from rlctl.batch import Episode, Task, Turn
from rlctl.environment.build import build_environment
from rlctl.environment.protocol import EnvironmentContext
from rlctl.environment.recording import Recorder
from rlctl.environment.renderer import ChatRenderer, Message
from rlctl.environment.run_episodes import run_episodes
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.environment import EnvironmentSpec
from tests.scripted_engine import chat_tokenizer

#: Schema of a tool.
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def turn_of(ids: list[int], finish_reason: str = "stop") -> Turn:
    """A turn of these tokens."""
    zeros = torch.zeros(len(ids))
    return Turn(torch.tensor(ids, dtype=torch.int64), zeros, zeros.long(), finish_reason)


class Scripted:
    """Samples the turns of a list, one after the other.

    Attributes:
        calls: what each turn read.
    """

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns, self.recorder = list(turns), Recorder()
        self.calls: list[list[int]] = []

    async def sample(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Turn:
        self.calls.append(list(token_ids))
        turn = self.turns[len(self.calls) - 1]
        self.recorder.add(token_ids, turn)
        return turn

    def watch(self, pid: int) -> None:
        """Nothing is timed."""


def task_with(renderer: ChatRenderer, messages: Sequence[Message]) -> Task:
    """A task whose prompt is rendered as data preparation renders it."""
    tokenizer: Any = renderer.tokenizer
    text = renderer.text(messages)
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Task(ids, text, messages=tuple(messages))


def check_recorded(sampler: Scripted) -> None:
    """The recorded tokens are what the model read and sampled; every sampled token is there once."""
    turns: dict[int, list[int]] = {}
    for sequence in sampler.recorder.sequences():
        ids, sampled = sequence.token_ids.tolist(), sequence.sampled.tolist()
        places = [place for place, is_sampled in enumerate(sampled) if is_sampled]
        assert len(places) == len(sequence.turns)
        for place, turn in zip(places, sequence.turns.tolist(), strict=True):
            if turn not in turns:
                assert ids[:place] == sampler.calls[turn]
            turns.setdefault(turn, []).append(ids[place])
    assert turns == {i: turn.token_ids.tolist() for i, turn in enumerate(sampler.turns[: len(sampler.calls)])}


QUESTION = ({"role": "user", "content": "2+2?"},)


def play_agent(name: str, engine: Any, n: int, length: int, **spec: Any) -> list[Episode]:
    """n episodes of an agent on `QUESTION`, which leave no process."""
    tokenizer, sampling = chat_tokenizer(), Sampling(max_response_length=length)
    environment_spec = EnvironmentSpec(**{"name": name, "max_turns": 4} | spec)
    ids = ChatRenderer(tokenizer).encode(ChatRenderer(tokenizer).text(QUESTION))
    task = Task(ids, "", messages=QUESTION, ground_truth="4", data_source="sums", extra_info={"level": 3})
    earlier = set(psutil.Process().children(recursive=True))
    context = EnvironmentContext(environment_spec, tokenizer, sampling, 400)
    environment = build_environment(environment_spec.name, context)
    try:
        members = [(task, member) for member in range(n)]
        return [*run_episodes(environment, engine, members, sampling, 1, environment_spec, 400)]
    finally:
        environment.close()
        assert not set(psutil.Process().children(recursive=True)) - earlier
