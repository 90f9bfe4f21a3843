"""Selects what the model body must process: drops padding-only columns, computes shared prompts once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from rlctl.batch import ModelInputs
from rlctl.engine.packing import packed
from rlctl.engine.sequence_parallel import SequenceParallel
from rlctl.errors import RunFailure
from rlctl.prefix import shared_prefix


def used_columns(inputs: ModelInputs) -> ModelInputs:
    """The columns that at least one row uses.

    Columns left of the longest prompt and right of the last scored token do not affect scored tokens.
    """
    width, length = inputs.scored.shape[1], inputs.input_ids.shape[1]
    prompt = max(int(inputs.attention_mask[:, : length - width].any(0).sum()), 1)
    used = inputs.scored.any(0).nonzero()
    horizon = int(used[-1]) + 1 if len(used) else 1
    columns = slice(length - width - prompt, length - width + horizon)
    return ModelInputs(
        inputs.input_ids[:, columns],
        inputs.attention_mask[:, columns],
        inputs.position_ids[:, columns],
        inputs.scored[:, :horizon],
        inputs.kept,
        inputs.likeliest,
    )


def arguments_of(inputs: ModelInputs) -> dict[str, Tensor]:
    """The inputs as keyword arguments of a module: engines that wrap modules handle tensors, not records."""
    return {name: getattr(inputs, name) for name in ("input_ids", "attention_mask", "position_ids", "scored")}


def list_arguments(inputs: ModelInputs) -> dict[str, Tensor]:
    """The token lists of the scored tokens, as keyword arguments of `PolicyModule`."""
    found = {}
    if inputs.kept is not None:
        found["kept_counts"], found["kept_ids"] = inputs.kept.at(inputs.scored)
    if inputs.likeliest is not None:
        found["likeliest_ids"], _ = inputs.likeliest.padded(inputs.scored)
    return found


def widened(values: Tensor, inputs: ModelInputs) -> Tensor:
    """Pads (B, t) of the used response columns to (B, T) with 0.0."""
    return functional.pad(values, (0, inputs.scored.shape[1] - values.shape[1]))


def scored_states(
    body: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    scored: Tensor,
    *,
    packs: bool,
    share_prompts: bool,
    sequence: SequenceParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """States of a body that predict the N scored tokens, in row order.

    Args:
        body: the model without its head.
        input_ids, attention_mask, position_ids, scored: as in `ModelInputs`.
        packs: process packed rows (`engine/packing.py`); `body` must support this.
        share_prompts: if rows are not packed, compute a prompt that adjacent rows share once.
        sequence: splits packed rows among ranks; `packs` must be True.

    Returns:
        (N, H) states and None; with `sequence`, (M, H) states of this rank's tokens, and (M,) indices of
        these among the N tokens.

    Raises:
        RunFailure: rows that must be split among ranks cannot be packed.
    """
    columns = (input_ids, attention_mask, position_ids)
    if packs and (rows := packed(body, *columns, scored)):
        rows = sequence.own_tokens(rows) if sequence else rows
        states: Tensor = body(**rows.inputs).last_hidden_state
        return states.flatten(0, 1).index_select(0, rows.states_at), rows.scored_at
    if sequence:
        what = "a row without a prompt, or longer than the window of a layer, cannot be split among ranks"
        raise RunFailure(what, where="engine.sequence_parallel", fix="set it to 1")
    horizon = scored.shape[1]
    inputs = body_inputs(body, *columns, horizon=horizon, share_prompts=share_prompts)
    states = body(**inputs).last_hidden_state[:, -horizon:]
    return states[scored], None


def body_inputs(
    body: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    *,
    horizon: int,
    share_prompts: bool,
) -> dict[str, Any]:
    """Inputs of a body such that its last `horizon` states predict the response tokens.

    The state before a token predicts it; the last token predicts nothing. From all but the last token of a
    shared prompt, only keys and values are therefore needed.

    Args:
        body: the model without its head.
        input_ids, attention_mask, position_ids: (B, L), the response being the last `horizon` columns.
        horizon: T.
        share_prompts: compute a prompt that adjacent rows share once; `body` must support this.
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
