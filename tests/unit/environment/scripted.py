"""A sampler that says what a test tells it to, and records tokens as training does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlctl.batch import Task, Turn
from rlctl.environment.recording import Recorder
from rlctl.environment.renderer import ChatRenderer, Message

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
