"""The environment of one question and one answer: one call of the engine per episode.

This is the only place where episodes are sampled: training, validation, evaluation and diagnosis call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from rlctl.algos.segments import Segments
from rlctl.batch import Task
from rlctl.episodes import Episodes, Turns
from rlctl.errors import RunFailure
from rlctl.rollout.protocol import Requests, ResponseSampler, Sampling
from rlctl.rollout.seeds import turn_seeds

#: Kinds of special tokens that texts of responses do not show.
LEFT_OUT = ("bos", "eos", "pad", "unk")


def sample_episodes(
    engine: ResponseSampler,
    tasks: Sequence[Task],
    n: int,
    sampling: Sampling,
    step_seed: int,
    tokenizer: Any,
) -> Episodes:
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
) -> Episodes:
    """Samples the episodes with these tasks and indices within their groups; see `sample_episodes`."""
    if not members:
        return Episodes.of([])
    numbers = [(task.group_id, member) for task, member in members]
    seeds = turn_seeds(step_seed, numbers)
    requests = Requests([task.prompt_ids for task, _ in members], seeds, [None] * len(members))
    turns = Turns.of(engine.sample(requests, sampling))
    _check_kept(turns)
    return Episodes.of_turns(members, turns, decode(tokenizer, _without_ends(turns)))


def decode(tokenizer: Any, token_ids: Sequence[Sequence[int]]) -> list[str]:
    """The texts of lists of tokens.

    Special tokens may mark an answer or thoughts: only start, end, padding and unknown tokens are left out.
    """
    left_out = {getattr(tokenizer, f"{name}_token_id", None) for name in LEFT_OUT}
    responses = [*map(tuple, token_ids)]
    different = [*dict.fromkeys(responses)]  # short ones repeat
    shown = [[token for token in ids if token not in left_out] for ids in different]
    texts = dict(zip(different, _decoded(tokenizer, shown), strict=True))
    return [texts[ids] for ids in responses]


def _decoded(tokenizer: Any, token_ids: list[list[int]]) -> list[str]:
    """The texts of lists of tokens, special ones included, without changes to spaces."""
    if getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode:
        backend = tokenizer.backend_tokenizer  # transformers looks at every token again
        return [backend.decode(ids, skip_special_tokens=False) for ids in token_ids]
    texts: list[str] = tokenizer.batch_decode(
        token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return texts


def _without_ends(turns: Turns) -> list[list[int]]:
    """The tokens of each turn without the token that ended it."""
    ids = turns.token_ids.tolist()
    ends = turns.lengths.cumsum(0).tolist()
    columns = zip([0, *ends], ends, turns.finish_reasons, strict=False)
    return [ids[start : end - (reason == "stop")] for start, end, reason in columns]


def _check_kept(turns: Turns) -> None:
    """Checks that every token is in the set that it was sampled from."""
    if turns.kept is None:
        return
    wrong = turns.kept.without(turns.token_ids).nonzero()
    if len(wrong):
        responses = Segments(turns.lengths)
        place = int(wrong[0])
        raise RunFailure(
            f"token {responses.places[place] + 1} of response {responses.index[place] + 1} is not among "
            "the tokens that the rollout engine kept",
            where="rollout.exact_sampling",
        )
