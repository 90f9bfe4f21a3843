"""What of a batch a model's body is run over: no column that only pads, no shared prompt twice."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from rlctl.batch import ModelInputs
from rlctl.engine.packing import packed
from rlctl.engine.sequence_parallel import OwnTokens, SequenceParallel
from rlctl.errors import RunFailure
from rlctl.prefix import shared_prefix


def used_columns(inputs: ModelInputs) -> ModelInputs:
    """The columns that some row uses.

    Columns left of the widest prompt and right of the last scored token change no scored token.
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
    )


def arguments_of(inputs: ModelInputs) -> dict[str, Tensor]:
    """The same as keyword arguments of a module: engines around modules handle tensors, not records."""
    return {name: getattr(inputs, name) for name in ("input_ids", "attention_mask", "position_ids", "scored")}


def kept_arguments(inputs: ModelInputs) -> dict[str, Tensor]:
    """What the scored tokens' log-probs are normalised over, where it is not the vocabulary."""
    if inputs.kept is None:
        return {}
    counts, ids = inputs.kept.at(inputs.scored)
    return {"kept_counts": counts, "kept_ids": ids}


def widened(values: Tensor, inputs: ModelInputs) -> Tensor:
    """(B, t) of the used response columns as (B, T) of all, 0.0 in the others."""
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
) -> tuple[Tensor, OwnTokens | None]:
    """(N, H): the states of a body that predict the N scored tokens, in row order.

    Args:
        body: the model without its head.
        input_ids, attention_mask, position_ids, scored: as of `ModelInputs`.
        packs: run the rows packed (`engine/packing.py`); `body` must be able to.
        share_prompts: where they are not packed, run a prompt that adjacent rows share once.
        sequence: cuts packed rows up among ranks; then (M, H), and which of the N they are. The model must be
            able to run them packed.

    Raises:
        RunFailure: rows that are to be cut up cannot be packed.
    """
    columns = (input_ids, attention_mask, position_ids)
    if packs and (rows := packed(body, *columns, scored)):
        own = sequence.own_tokens(rows) if sequence else None
        states: Tensor = body(**(own or rows).inputs).last_hidden_state
        return states.flatten(0, 1).index_select(0, (own or rows).states_at), own
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
