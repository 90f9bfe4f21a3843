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
        inputs.most_likely,
    )


def arguments_of(inputs: ModelInputs) -> dict[str, Tensor]:
    """The inputs as keyword arguments of a module: engines that wrap modules handle tensors, not records."""
    return {name: getattr(inputs, name) for name in ("input_ids", "attention_mask", "position_ids", "scored")}


def list_arguments(inputs: ModelInputs) -> dict[str, Tensor]:
    """The token lists of the scored tokens, as keyword arguments of `PolicyModule`."""
    found = {}
    if inputs.kept is not None:
        found["kept_counts"], found["kept_ids"] = inputs.kept.at(inputs.scored)
    if inputs.most_likely is not None:
        found["most_likely_ids"], _ = inputs.most_likely.padded(inputs.scored)
    return found


def widened(values: Tensor, inputs: ModelInputs) -> Tensor:
    """Pads (B, t) of the used response columns to (B, T) with 0.0."""
    return functional.pad(values, (0, inputs.scored.shape[1] - values.shape[1]))


def scored_states(
    body: Any,
    inputs: ModelInputs,
    *,
    packs: bool,
    share_prompts: bool,
    sequence: SequenceParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """States of a body that predict the N scored tokens, in row order.

    Args:
        body: the model without its head.
        inputs: any number of rows.
        packs: process packed rows (`engine/packing.py`); `body` must support this.
        share_prompts: if rows are not packed, compute a prompt that adjacent rows share once.
        sequence: splits packed rows among ranks; `packs` must be True.

    Returns:
        (N, H) states and None; with `sequence`, (M, H) states of this rank's tokens, and (M,) indices of
        these among the N tokens.

    Raises:
        RunFailure: rows that must be split among ranks cannot be packed.
    """
    if packs and (rows := packed(body, inputs)):
        rows = sequence.own_tokens(rows) if sequence else rows
        states: Tensor = body(**rows.inputs).last_hidden_state
        return states.flatten(0, 1).index_select(0, rows.states_at), rows.scored_at
    if sequence:
        what = "a row without a prompt, or longer than the window of a layer, cannot be split among ranks"
        raise RunFailure(what, where="engine.sequence_parallel", fix="set it to 1")
    arguments = body_inputs(body, inputs, share_prompts=share_prompts)
    states = body(**arguments).last_hidden_state[:, -inputs.scored.shape[1] :]
    return states[inputs.scored], None


def body_inputs(body: Any, inputs: ModelInputs, *, share_prompts: bool) -> dict[str, Any]:
    """Arguments of a body such that its last T states predict the response tokens.

    The state before a token predicts it; the last token predicts nothing. From all but the last token of a
    shared prompt, only keys and values are therefore needed.

    Args:
        body: the model without its head.
        inputs: rows with T response columns.
        share_prompts: compute a prompt that adjacent rows share once; `body` must support this.
    """
    columns = (inputs.input_ids, inputs.attention_mask, inputs.position_ids)
    ids, mask, positions = (part[:, :-1] for part in columns)
    arguments = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}
    start = ids.shape[1] - inputs.scored.shape[1]
    cache = None
    if share_prompts:
        cache = shared_prefix(body, ids[:, :start], mask[:, :start], positions[:, :start])
    if cache is None:
        return arguments | {"use_cache": False}
    rest = {"input_ids": ids[:, start:], "position_ids": positions[:, start:]}
    return arguments | rest | {"past_key_values": cache, "use_cache": True}
