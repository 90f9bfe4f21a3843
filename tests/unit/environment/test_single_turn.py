"""One question, one answer: what an episode is made of, and what it depends on."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain

import pytest
import torch

from rlctl.batch import TokenBatch, TokenLists, Turn
from rlctl.environment.single_turn import decode, sample_episodes, sample_members
from rlctl.errors import RunFailure
from rlctl.rollout.protocol import Sampling
from rlctl.rollout.seeds import turn_seed
from rlctl.run_spec.model import RECIPE
from rlctl.tiny.model import build_tokenizer
from tests.episodes import RandomEngine, same, task_of

TOKENIZER = build_tokenizer(RECIPE)
END = TOKENIZER.eos_token_id
SAMPLING = Sampling(max_response_length=5)


class Answers:
    """Gives these turns."""

    def __init__(self, *turns: Turn) -> None:
        self._turns = list(turns)

    def sample(self, requests, sampling):
        del sampling
        assert len(requests) == len(self._turns)
        return self._turns


def turn_of(ids: list[int], reason: str = "length", kept: TokenLists | None = None) -> Turn:
    count = len(ids)
    log_probs = -torch.arange(1.0, count + 1)
    return Turn(torch.tensor(ids, dtype=torch.int64), log_probs, torch.full((count,), 3), reason, kept)


def sample(*turns: Turn, tokenizer=TOKENIZER):
    return sample_episodes(Answers(*turns), [task_of()], len(turns), SAMPLING, 1, tokenizer)


def test_an_end_token_inside_a_response_ends_nothing() -> None:
    """As if a tool's output follows it and the policy continues."""
    longer, ended, aborted = sample(
        turn_of([5, END, 6, 7]), turn_of([5, 6, END], "stop"), turn_of([], "abort")
    )
    assert [(e.stop_reason, e.truncated, e.aborted) for e in (longer, ended, aborted)] == [
        ("max_tokens", True, False),
        ("completed", False, False),
        ("aborted", False, True),
    ]
    assert [e.num_sampled for e in (longer, ended, aborted)] == [4, 3, 0]
    assert ended.response == TOKENIZER.decode([5, 6])
    assert longer.response == TOKENIZER.decode([5, 6, 7])
    [sequence] = ended.sequences
    prompt = list(task_of().prompt_ids)
    assert sequence.token_ids.tolist() == [*prompt, 5, 6, END]
    assert sequence.sampled.tolist() == [False] * len(prompt) + [True] * 3
    assert sequence.log_probs.tolist() == [-1.0, -2.0, -3.0]
    assert (sequence.versions.tolist(), sequence.turns.tolist()) == ([3] * 3, [0] * 3)
    assert TokenBatch.of([longer, ended, aborted]).units.episode.lengths.tolist() == [4, 3, 0]


def test_special_tokens_within_a_response_are_a_part_of_its_text() -> None:
    """They may be tags of an answer, or marks of thoughts."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    ids = tokenizer("<answer>42</answer>", add_special_tokens=False)["input_ids"]
    [episode] = sample(turn_of([*ids, END], "stop"), tokenizer=tokenizer)
    assert episode.response == "<answer>42</answer>"
    padded = [END, *ids, tokenizer.pad_token_id, END]
    assert decode(tokenizer, [padded, []]) == ["<answer>42</answer>", ""]


@pytest.mark.parametrize(("place", "named"), [(1, "token 2 of response 1"), (3, "token 1 of response 3")])
def test_a_token_outside_of_what_the_engine_kept_is_refused(place: int, named: str) -> None:
    sets = [[5, 7], [6], [], [8]]  # nothing kept: the whole vocabulary
    tokens = [[5, 6], [9], [8]]

    def turns(sets: list[list[int]]) -> list[Turn]:
        kept = [
            TokenLists(torch.tensor([len(s) for s in part]).int(), torch.tensor(list(chain(*part))).int())
            for part in (sets[:2], sets[2:3], sets[3:])
        ]
        return [turn_of(ids, kept=lists) for ids, lists in zip(tokens, kept, strict=True)]

    assert all(episode.sequences[0].kept is not None for episode in sample(*turns(sets)))
    sets[place] = [10, 11]
    with pytest.raises(RunFailure, match=f"{named} is not among"):
        sample(*turns(sets))


def test_an_episode_depends_on_its_group_and_its_place_in_it_only() -> None:
    tasks = [task_of(group) for group in range(4)]
    whole = sample_episodes(RandomEngine(), tasks, 3, SAMPLING, 7, TOKENIZER)
    assert [(e.task.group_id, e.member) for e in whole] == [(g, m) for g in range(4) for m in range(3)]
    assert len({str(episode.sequences[0].token_ids.tolist()) for episode in whole}) == 12
    some = [(tasks[3], 2), (tasks[0], 1)]
    assert same([*sample_members(RandomEngine(), some, SAMPLING, 7, TOKENIZER)], [whole[11], whole[1]])
    fewer = sample_episodes(RandomEngine(), tasks[1:2], 2, SAMPLING, 7, TOKENIZER)
    assert same(fewer, whole[3:5])
    other = sample_episodes(RandomEngine(), tasks, 3, SAMPLING, 8, TOKENIZER)
    assert not any(same(a.sequences, b.sequences) for a, b in zip(whole, other, strict=True))


def test_requests_are_prompts_with_their_seeds_siblings_adjacent() -> None:
    engine = RandomEngine()
    tasks = [task_of(group) for group in (5, 2)]
    sample_episodes(engine, tasks, 2, replace(SAMPLING, greedy=True), 9, TOKENIZER)
    [requests] = engine.calls
    asked = [(list(request.token_ids), request.seed) for request in requests]
    assert asked == [(list(t.prompt_ids), turn_seed(9, t.group_id, m)) for t in tasks for m in range(2)]


def test_nothing_is_asked_for_no_task() -> None:
    engine = RandomEngine()
    assert not len(sample_episodes(engine, [], 4, SAMPLING, 1, TOKENIZER))
    assert engine.calls == []
