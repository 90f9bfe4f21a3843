"""The environment of one question and one answer: one call of the engine per episode.

This is the only place where episodes are sampled: training, validation, evaluation and diagnosis call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlctl.algos.segments import Segments
from rlctl.batch import Episode, Task, TokenLists, Turn
from rlctl.batch import Sequence as TokenSequence
from rlctl.errors import RunFailure
from rlctl.rollout.protocol import Request, ResponseSampler, Sampling, turn_seed

#: Finish reason of the turn → stop reason of the episode.
_STOP_REASONS = {"stop": "completed", "length": "max_tokens", "abort": "aborted"}

#: Kinds of special tokens that texts of responses do not show.
LEFT_OUT = ("bos", "eos", "pad", "unk")


def sample_episodes(
    engine: ResponseSampler,
    tasks: Sequence[Task],
    n: int,
    sampling: Sampling,
    step_seed: int,
    tokenizer: Any,
) -> list[Episode]:
    """Samples n episodes of each task; siblings are adjacent.

    An episode depends only on `step_seed`, its task's `group_id` and its index within the group.

    Raises:
        RunFailure: the engine failed, or a token is not among those that it reports as kept.
    """
    members = [(task, member) for task in tasks for member in range(n)]
    return sample_members(engine, members, sampling, step_seed, tokenizer)


def sample_members(
    engine: ResponseSampler,
    members: Sequence[tuple[Task, int]],
    sampling: Sampling,
    step_seed: int,
    tokenizer: Any,
) -> list[Episode]:
    """Samples the episodes with these tasks and indices within their groups; see `sample_episodes`."""
    if not members:
        return []
    requests = [
        Request(task.prompt_ids, turn_seed(step_seed, task.group_id, member)) for task, member in members
    ]
    turns = engine.sample(requests, sampling)
    _check_kept(turns)
    texts = decode(tokenizer, [_without_end(turn) for turn in turns])
    return [
        Episode(
            task,
            member,
            (TokenSequence.of_turn(task.prompt_ids, turn),),
            text,
            _STOP_REASONS[turn.finish_reason],
        )
        for (task, member), turn, text in zip(members, turns, texts, strict=True)
    ]


def decode(tokenizer: Any, token_ids: Sequence[Sequence[int]]) -> list[str]:
    """The texts of lists of tokens.

    Special tokens may mark an answer or thoughts: only start, end, padding and unknown tokens are left out.
    """
    left_out = {getattr(tokenizer, f"{name}_token_id", None) for name in LEFT_OUT}
    texts: list[str] = tokenizer.batch_decode(
        [[token for token in ids if token not in left_out] for ids in token_ids],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    return texts


def _without_end(turn: Turn) -> list[int]:
    """The tokens of a turn without the token that ended it."""
    ids: list[int] = turn.token_ids.tolist()
    return ids[:-1] if turn.finish_reason == "stop" else ids


def _check_kept(turns: Sequence[Turn]) -> None:
    """Checks that every token is in the set that it was sampled from."""
    lists = [turn.kept for turn in turns if turn.kept is not None]
    if not lists:
        return
    tokens = [turn.token_ids for turn in turns]
    wrong = TokenLists.joined(lists).without(torch.cat(tokens)).nonzero()
    if len(wrong):
        responses, place = Segments(torch.tensor([len(ids) for ids in tokens])), int(wrong[0])
        raise RunFailure(
            f"token {responses.places[place] + 1} of response {responses.index[place] + 1} is not among "
            "the tokens that the rollout engine kept",
            where="rollout.exact_sampling",
        )
