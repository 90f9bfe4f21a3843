"""Which tokens end a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.errors import UsageError


def end_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """Ids of all tokens that end a response: those of the tokenizer and of the model's generation config.

    Raises:
        UsageError: there is none.
    """
    ids: dict[int, None] = {}  # an ordered set
    for named in (tokenizer.eos_token_id, generation_config.eos_token_id):
        if named is not None:
            ids.update(dict.fromkeys([named] if isinstance(named, int) else named))
    if not ids:
        raise UsageError(
            "neither the tokenizer nor the model's generation config names an end-of-sequence token",
            fix="set eos_token in tokenizer_config.json",
        )
    return list(ids)


def unknown_end(tokenizer: Any, ends: Sequence[int]) -> str | None:
    """First special token that the chat template writes after a reply, if it writes none of `ends` there.

    None if one of them ends a response, or if the template does not show how a reply ends.
    """
    if not tokenizer.chat_template:
        return None
    reply = "REPLY"
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reply}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # the template accepts no replies
        return None
    after = tokenizer(text.rpartition(reply)[2], add_special_tokens=False)["input_ids"]
    known = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    special = [token for token in after if token in known]
    if not special or set(special) & set(ends):
        return None
    return str(tokenizer.convert_ids_to_tokens(special[0]))
