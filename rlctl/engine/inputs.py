"""What of a batch a model's body is run over: no column that only pads, no shared prompt twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from rlctl.prefix import shared_prefix

if TYPE_CHECKING:
    from rlctl.batch import TrainBatch


def used_columns(batch: TrainBatch) -> dict[str, Tensor]:
    """The columns that some row uses: `input_ids`, `attention_mask`, `position_ids`, `response_mask`.

    Columns left of the widest prompt and right of the longest response are padding on every row.
    """
    width, length = batch.responses.shape[1], batch.input_ids.shape[1]
    prompt = max(int(batch.attention_mask[:, : length - width].any(0).sum()), 1)
    horizon = max(_last_used(batch.response_mask), 1)
    columns = slice(length - width - prompt, length - width + horizon)
    return {
        "input_ids": batch.input_ids[:, columns],
        "attention_mask": batch.attention_mask[:, columns],
        "position_ids": batch.position_ids[:, columns],
        "response_mask": batch.response_mask[:, :horizon],
    }


def widened(values: Tensor, batch: TrainBatch) -> Tensor:
    """(B, t) of the used response columns as the batch's (B, T), 0.0 in the others."""
    return functional.pad(values, (0, batch.responses.shape[1] - values.shape[1]))


def body_of(model: Any) -> Any:
    """A causal language model without its output head, or None where that is no part of its own."""
    body = getattr(model, model.base_model_prefix, None)
    return None if body is model else body


def body_inputs(
    body: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    *,
    horizon: int,
    share_prompts: bool,
) -> dict[str, Any]:
    """What a body reads so that its last `horizon` states are those that predict the responses.

    The state before a token predicts it; the last token predicts nothing. So of a shared prompt all
    but the last token is wanted for its keys and values only.

    Args:
        body: the model without its head.
        input_ids, attention_mask, position_ids: (B, L), the response being the last `horizon` columns.
        horizon: T.
        share_prompts: run a prompt that adjacent rows share once; `body` must be able to.
    """
    ids, mask, positions = input_ids[:, :-1], attention_mask[:, :-1], position_ids[:, :-1]
    inputs = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}
    start = ids.shape[1] - horizon
    cache = None
    if share_prompts:
        cache = shared_prefix(body, ids[:, :start], mask[:, :start], positions[:, :start])
    if cache is None:
        return inputs | {"use_cache": False}
    rest = {"input_ids": ids[:, start:], "position_ids": positions[:, start:]}
    return inputs | rest | {"past_key_values": cache, "use_cache": True}


def _last_used(mask: Tensor) -> int:
    used = mask.any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0
