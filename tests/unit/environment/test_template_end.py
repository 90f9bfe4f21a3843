"""Which tokens end a response, and a chat template that ends replies with another one."""

from __future__ import annotations

import copy

import pytest

from rlctl.environment.template_audit import unknown_end
from tests.unit.rollout.test_hf_rollout import TOKENIZER

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
