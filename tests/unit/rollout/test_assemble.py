"""Lengths and finish reasons are those of the engine; no end token is searched for."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from rlctl.batch import FINISH_REASONS, TokenLists
from rlctl.errors import RunFailure
from rlctl.rollout.assemble import assemble, unknown_end
from rlctl.rollout.hf import RecordingSampler
from rlctl.rollout.protocol import Sampled, Sampling
from tests.unit.rollout.test_hf_rollout import TOKENIZER, make_prompts, take

EOS = TOKENIZER.eos_token_id


def test_an_end_token_inside_a_response_ends_nothing() -> None:
    """As if a tool's output follows it and the policy continues."""
    tokens = torch.tensor([[5, EOS, 6, 7], [5, 6, EOS, 0]])
    reasons = torch.tensor([FINISH_REASONS.index("length"), FINISH_REASONS.index("stop")], dtype=torch.int8)
    sampled = Sampled(tokens, torch.full((2, 4), -1.0), torch.tensor([4, 3]), reasons)
    prompts = take(make_prompts(), [0])
    rollouts = assemble(prompts, sampled, n=2, tokenizer=TOKENIZER, policy_version=3)
    assert rollouts.response_mask.tolist() == [[True] * 4, [True, True, True, False]]
    assert rollouts.truncated.tolist() == [True, False]
    assert rollouts.aborted.tolist() == [False, False]
    assert rollouts.rollout_log_probs.tolist() == [[-1.0] * 4, [-1.0, -1.0, -1.0, 0.0]]
    width = prompts.prompt_ids.shape[1]
    assert rollouts.attention_mask[:, width:].tolist() == rollouts.response_mask.tolist()
    assert rollouts.response_texts[1] == TOKENIZER.decode([5, 6])


def test_special_tokens_within_a_response_are_a_part_of_its_text() -> None:
    """They may be tags of an answer, or marks of thoughts."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    ids = tokenizer("<answer>42</answer>", add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([[*ids, EOS]])
    reasons = torch.tensor([FINISH_REASONS.index("stop")], dtype=torch.int8)
    sampled = Sampled(tokens, torch.zeros(tokens.shape), torch.tensor([len(ids) + 1]), reasons)
    rollouts = assemble(take(make_prompts(), [0]), sampled, n=1, tokenizer=tokenizer, policy_version=0)
    assert rollouts.response_texts == ("<answer>42</answer>",)


def test_a_token_outside_of_what_the_engine_kept_is_refused() -> None:
    tokens, reasons = torch.tensor([[5, 6]]), torch.zeros(1, dtype=torch.int8)
    for ids, is_fine in ([5, 7, 6], True), ([5, 7, 8], False):
        kept = TokenLists(torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor(ids, dtype=torch.int32))
        sampled = Sampled(tokens, torch.zeros(1, 2), torch.tensor([2]), reasons, kept)
        make = partial(assemble, take(make_prompts(), [0]), sampled, n=1, tokenizer=TOKENIZER)
        if is_fine:
            assert make(policy_version=0).kept is not None
        else:
            with pytest.raises(RunFailure, match="token 2 of response 1 is not among"):
                make(policy_version=0)


def test_the_sampler_counts_what_it_chose_and_says_why_a_row_ended() -> None:
    """Tokens chosen for a row after its end are not counted, whatever they are."""
    chosen = torch.tensor([[5, 9, 6], [5, 6, 7], [8, 9, 9]])
    sampler = RecordingSampler(torch.zeros(3, 3, dtype=torch.float64), 0, Sampling(3, greedy=True), [9, 8])
    for place in range(3):
        sampler(chosen[:, :place], torch.nn.functional.one_hot(chosen[:, place], 10).float())
    assert sampler.lengths.tolist() == [2, 3, 1]
    assert sampler.stopped.tolist() == [True, False, True]


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}END{% endfor %}"


@pytest.mark.parametrize(("end", "named"), [("<eos>", None), ("<|turn|>", "<|turn|>"), ("\n", None)])
def test_a_template_that_ends_a_reply_otherwise_than_responses_end(end: str, named: str | None) -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = TEMPLATE.replace("END", end.replace("<eos>", tokenizer.eos_token))
    assert unknown_end(tokenizer, [tokenizer.eos_token_id]) == named
    turn = tokenizer.convert_tokens_to_ids("<|turn|>")
    assert unknown_end(tokenizer, [tokenizer.eos_token_id, turn]) is None
    tokenizer.chat_template = None
    assert unknown_end(tokenizer, [tokenizer.eos_token_id]) is None
