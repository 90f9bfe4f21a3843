"""Converts sampled tokens to `Rollouts`; shared by all engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlctl.batch import FINISH_REASONS, Prompts, Rollouts
from rlctl.errors import RunFailure, UsageError
from rlctl.rollout.protocol import Sampled

_Item = TypeVar("_Item")


def assemble(prompts: Prompts, sampled: Sampled, *, n: int, tokenizer: Any, policy_version: int) -> Rollouts:
    """Combines prompts and their sampled responses into one batch.

    Args:
        prompts: N prompts.
        sampled: B = N·n responses, siblings adjacent.
        policy_version: number of optimizer updates in the sampling weights.

    Raises:
        RunFailure: a sampled token is not among the tokens that the engine reports as kept.
    """
    responses, lengths = sampled.tokens, sampled.lengths
    device = responses.device
    prompt_ids = prompts.prompt_ids.to(device).repeat_interleave(n, dim=0)
    prompt_mask = prompts.prompt_mask.to(device).repeat_interleave(n, dim=0)
    group_ids = prompts.group_ids.to(device).repeat_interleave(n)
    is_sampled = torch.arange(responses.shape[1], device=device) < lengths[:, None]
    attention_mask = torch.cat([prompt_mask, is_sampled], dim=1)
    kept = sampled.kept and sampled.kept.to(device)
    if kept and (wrong := kept.without(responses, is_sampled)).any():
        row, column = wrong.nonzero()[0].tolist()
        raise RunFailure(
            f"token {column + 1} of response {row + 1} is not among the tokens that the rollout engine kept",
            where="rollout.exact_sampling",
        )
    ended = sampled.finish_reason == FINISH_REASONS.index("stop")
    return Rollouts(
        input_ids=torch.cat([prompt_ids, responses], dim=1),
        attention_mask=attention_mask,
        position_ids=positions(attention_mask),
        responses=responses,
        response_mask=is_sampled,
        rollout_log_probs=sampled.log_probs.masked_fill(~is_sampled, 0.0),
        finish_reason=sampled.finish_reason,
        group_ids=group_ids,
        policy_version=torch.full_like(group_ids, policy_version),
        data_sources=_repeat(prompts.data_sources, n),
        ground_truths=_repeat(prompts.ground_truths, n),
        prompt_texts=_repeat(prompts.texts, n),
        response_texts=_decode(tokenizer, responses, lengths - ended.long()),
        extra_infos=_repeat(prompts.extra_infos, n),
        messages=_repeat(prompts.messages, n),
        kept=kept,
        most_likely=sampled.most_likely and sampled.most_likely.to(device),
    )


def synced(policy_version: int | None) -> int:
    """Returns the version of an engine's weights.

    Raises:
        RunFailure: it is None, because the last weight sync did not finish.
    """
    if policy_version is None:
        raise RunFailure("the last weight sync to the rollout engine failed: it holds old and new weights")
    return policy_version


def positions(attention_mask: Tensor) -> Tensor:
    """(B, L) int64 position ids, 0 at the first token that is not padding."""
    return (attention_mask.cumsum(dim=1) - 1).clamp_(min=0)


def sample_ids(group_ids: Tensor, n: int) -> Tensor:
    """(N·n,) int64: index of each response in the whole batch over all ranks, from `group_ids` (N,)."""
    return group_ids.repeat_interleave(n) * n + torch.arange(n, device=group_ids.device).repeat(
        len(group_ids)
    )


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


def _decode(tokenizer: Any, responses: Tensor, lengths: Tensor) -> tuple[str, ...]:
    """Texts of the first `lengths` (B,) tokens of each row.

    Special tokens may mark an answer or thoughts: only start, end, padding and unknown tokens are left out.
    """
    left_out = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")}
    rows = zip(responses.tolist(), lengths.tolist(), strict=True)
    return tuple(
        tokenizer.batch_decode(
            [[token for token in row[:length] if token not in left_out] for row, length in rows],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
    )


def _repeat(items: tuple[_Item, ...], n: int) -> tuple[_Item, ...]:
    return tuple(item for item in items for _ in range(n))
