"""Groups of episodes out of random numbers, and an engine without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, is_dataclass

import torch

from rlctl.batch import Episode, Group, Task, TokenLists, TokenSequence, Turn
from rlctl.episodes import Episodes
from rlctl.rollout.protocol import Request, Sampling

END, LETTERS, KEPT = 1, range(2, 20), 3


class RandomEngine:
    """Samples tokens at random, by the seed of each request; the last of a shorter turn is `END`.

    Attributes:
        version: number of updates in its weights.
        calls: the requests of each call.
        aborts: (call, index of the request) that it aborts.
    """

    def __init__(self) -> None:
        self.version = 0
        self.calls: list[list[Request]] = []
        self.aborts: set[tuple[int, int]] = set()

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[Turn]:
        """One turn per request."""
        self.calls.append(list(requests))
        turns = [self._turn(request, sampling) for request in requests]
        for call, index in self.aborts:
            if call == len(self.calls):
                turn = turns[index]
                turns[index] = Turn(turn.token_ids, turn.log_probs, turn.versions, "abort")
        return turns

    def finish(self) -> None:
        """Nothing is shared."""

    def release(self, *, weights_follow: bool) -> None:
        """Nothing is held."""

    def _turn(self, request: Request, sampling: Sampling) -> Turn:
        draw = random.Random("greedy" if sampling.greedy else request.seed)
        longest = sampling.max_response_length
        length = draw.randint(1, longest + 1)
        ids = [draw.choice(LETTERS) for _ in range(min(length, longest))]
        if length <= longest:
            ids[-1] = END
        count = len(ids)
        lists = (
            torch.tensor([[token, *draw.sample(range(20, 40), KEPT - 1)] for token in ids]).flatten().int()
        )
        sizes = torch.full((count,), KEPT, dtype=torch.int32)
        log_probs = -torch.tensor([draw.random() for _ in range(count * (1 + KEPT))])
        return Turn(
            token_ids=torch.tensor(ids),
            log_probs=log_probs[:count],
            versions=torch.full((count,), self.version),
            finish_reason="stop" if length <= longest else "length",
            kept=TokenLists(sizes, lists) if sampling.with_kept else None,
            most_likely=TokenLists(sizes, lists, log_probs[count:]) if sampling.num_most_likely else None,
        )


def task_of(group_id: int = 0, **given: object) -> Task:
    """A task of three tokens."""
    prompt = [2 + group_id % 18, 3, 4]
    defaults: dict[str, object] = {"text": f"prompt {group_id}", "group_id": group_id, "row": group_id}
    return Task(prompt, **(defaults | given))  # type: ignore[arg-type]


def episode_of(task: Task, member: int, turn: Turn, response: str = "", **given: object) -> Episode:
    """An episode of one turn."""
    sequence = TokenSequence.of_turn(task.prompt_ids, turn)
    reasons = {"stop": "completed", "length": "max_tokens", "abort": "aborted"}
    return Episode(task, member, (sequence,), response, reasons[turn.finish_reason], **given)  # type: ignore[arg-type]


def groups_of(
    seed: int = 0, version: int = 0, sizes: Sequence[int] = (3, 2, 4), **sampling: bool | int
) -> list[Group]:
    """Groups of these sizes whose log-probs are of no policy in particular."""
    engine = RandomEngine()
    engine.version = version
    found = []
    for group_id, size in enumerate(sizes):
        requests = [Request([2], (seed * 1000 + group_id) * 1000 + member) for member in range(size)]
        turns = engine.sample(requests, Sampling(6, **sampling))  # type: ignore[arg-type]
        task = task_of(
            group_id, extra_info={"a": [1, None, 0.5]}, messages=({"role": "user", "content": "a"},)
        )
        found.append(tuple(episode_of(task, member, turn, f"r{member}") for member, turn in enumerate(turns)))
    return found


def flat(groups: Sequence[Sequence[Episode]]) -> Episodes:
    """The episodes of these groups."""
    return Episodes.of([episode for group in groups for episode in group])


def same(a: object, b: object) -> bool:
    """Whether two records, or lists of them, are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    return a == b
