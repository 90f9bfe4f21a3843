"""Selects what the model's body must process: drops padding-only columns, and packs rows or shares prompts.

Packed rows have no padding, and a prompt that several responses share occurs once:

    rows of a batch (left and right padding)      packed
    · p p p  a a ·                                p p p a a b c c | q q d d d
    · p p p  b · ·                                attention: causal, within a response and its own prompt
    · p p p  c c ·                                position: that of the token in its original row
    · · q q  d d d

The mask alone determines the past that a token attends to, so the states equal those of the separate rows.
With a mask, a packed row is at most as long as the longest sequence or `packed_width`, because the mask is
dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlctl.batch import ModelInputs
from rlctl.errors import RunFailure
from rlctl.prefix import UNSUPPORTED, evaluating, has_keys_only, shared_prefix
from rlctl.spec.memory import packed_width

#: Largest relative difference that one layer's rounding explains, in half precision and in float32.
_TOLERANCE, _TOLERANCE_FP32 = 0.04, 0.001


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Inputs of a model's body, and the indices of the states that predict the scored tokens.

    Attributes:
        inputs: keyword arguments of the body.
        states_at: (M,) int64, indices into the flattened (rows × width) states; M scored tokens in row order.
        scored_at: (M,) int64, indices of these tokens among all N scored tokens; None: they are all.
    """

    inputs: dict[str, Any]
    states_at: Tensor
    scored_at: Tensor | None = None


@dataclass(slots=True)
class _Unit:
    """Adjacent sequences with one prompt.

    Attributes:
        row: a row that contains the prompt.
        prompt: number of prompt tokens.
        members: (row, number of response tokens read) of each sequence.
    """

    row: int
    prompt: int
    members: list[tuple[int, int]]

    @property
    def length(self) -> int:
        return self.prompt + sum(length for _, length in self.members)


def packed(body: Any, batch: ModelInputs) -> PackedRows | None:
    """Packs the sequences of a batch without padding.

    Args:
        body: a causal language model without its head, for which `can_pack` holds.
        batch: rows whose attended response tokens come first.

    Returns:
        The packed rows; None if a row has no prompt, or a layer's window is shorter than a sequence.
    """
    input_ids, attention_mask, scored = batch.input_ids, batch.attention_mask, batch.scored
    device, horizon, config = input_ids.device, scored.shape[1], body.config
    start = input_ids.shape[1] - horizon
    # The state before a token predicts it: the last scored token and later tokens are not read.
    places = torch.arange(horizon, device=device)
    reads = (scored * places).amax(1)
    prompts = attention_mask[:, :start].sum(1)
    differs = (input_ids[1:, :start] != input_ids[:-1, :start]) & attention_mask[1:, :start]
    is_new = differs.any(1) | (prompts[1:] != prompts[:-1])
    prompt_list, read_list, new_list = prompts.tolist(), reads.tolist(), [True, *is_new.tolist()]
    longest = max(map(sum, zip(prompt_list, read_list, strict=True)))
    if longest > _window(config) or min(prompt_list) == 0:
        return None
    is_flash = "flash" in config._attn_implementation  # also in names of kernels from the hub
    if is_flash:  # takes no mask: sequences in one row, separated by restarting positions
        bins = [[_Unit(row, prompt_list[row], [(row, read_list[row])]) for row in range(len(input_ids))]]
    else:
        width = max(longest, packed_width(config.hidden_size))
        bins = _bins(_units(prompt_list, read_list, new_list, width), width)
    rows, unit_of, member_of = _layout(bins, batch)
    if not is_flash:
        mask = _mask(unit_of, member_of)
        if config._attn_implementation == "eager":  # it adds the mask to the scores
            dtype = next(body.parameters()).dtype
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
        rows.inputs["attention_mask"] = mask
    return rows


def _units(prompts: list[int], reads: list[int], is_new: list[bool], width: int) -> list[_Unit]:
    """Groups adjacent rows with equal prompts, up to `width` tokens per group."""
    units: list[_Unit] = []
    for row, (prompt, read, new) in enumerate(zip(prompts, reads, is_new, strict=True)):
        if new or units[-1].length + read > width:
            units.append(_Unit(row, prompt, []))
        units[-1].members.append((row, read))
    return units


def _bins(units: list[_Unit], width: int) -> list[list[_Unit]]:
    """Places each unit, longest first, in the first bin with enough space."""
    bins: list[list[_Unit]] = []
    free: list[int] = []
    for unit in sorted(units, key=lambda unit: -unit.length):
        for place, left in enumerate(free):
            if unit.length <= left:
                bins[place].append(unit)
                free[place] -= unit.length
                break
        else:
            bins.append([unit])
            free.append(width - unit.length)
    return bins


def _layout(bins: list[list[_Unit]], batch: ModelInputs) -> tuple[PackedRows, Tensor, Tensor]:
    """The packed tokens; and (R, W) unit (0: padding) and member (-1: the prompt) of each token."""
    device, (num_rows, columns) = batch.input_ids.device, batch.input_ids.shape
    horizon = batch.scored.shape[1]
    start, width = columns - horizon, max(sum(unit.length for unit in units) for units in bins)
    source = torch.zeros(len(bins), width, dtype=torch.int64)
    unit_of = torch.zeros(len(bins), width, dtype=torch.int64)
    member_of = torch.full((len(bins), width), -1, dtype=torch.int64)
    # Per row: index of the first response token minus one, and index of the last prompt token.
    first, last_of_prompt = [0] * num_rows, [0] * num_rows
    number = 0
    for place, units in enumerate(bins):
        end = 0
        for unit in units:
            begin, end = end, end + unit.prompt
            origin = unit.row * columns + start
            source[place, begin:end] = torch.arange(origin - unit.prompt, origin)
            number += 1
            unit_of[place, begin : begin + unit.length] = number
            for row, read in unit.members:
                last_of_prompt[row] = place * width + begin + unit.prompt - 1
                first[row] = place * width + end - 1
                origin = row * columns + start
                source[place, end : end + read] = torch.arange(origin, origin + read)
                member_of[place, end : end + read] = row
                end += read
    source = source.to(device)
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids.flatten()[source],
        "position_ids": batch.position_ids.flatten()[source],
        "attention_mask": None,
        "use_cache": False,
    }
    # The state before response token t: that of the last prompt token for t = 0, else of token t − 1.
    steps = torch.arange(horizon)
    states_at = torch.tensor(first)[:, None] + steps
    states_at[:, 0] = torch.tensor(last_of_prompt)
    return PackedRows(inputs, states_at.to(device)[batch.scored]), unit_of.to(device), member_of.to(device)


def _mask(unit_of: Tensor, member_of: Tensor) -> Tensor:
    """(R, 1, W, W) bool: a token attends to the past of its prompt and response, padding to padding."""
    width = unit_of.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=unit_of.device).tril()
    of_prompt = (member_of == -1) & (unit_of > 0)
    same_member = member_of[:, :, None] == member_of[:, None, :]
    same_unit = unit_of[:, :, None] == unit_of[:, None, :]
    return (causal & same_unit & (of_prompt[:, None, :] | same_member))[:, None]


def _window(config: Any) -> int:
    """Shortest attention window of all layers, in tokens."""
    names = ("sliding_window", "attention_chunk_size")
    return min(getattr(config, name, None) or 1 << 62 for name in names)


@torch.no_grad()
def can_pack(body: Any) -> bool:
    """Whether a model without its head gives the same states for packed rows as for separate sequences.

    Recurrent states continue through the whole row, and some attention layers build their own mask. Instead
    of a list of architectures, this compares both computations on a short probe, and looks into the cache.
    """
    if body is None:  # the model has none
        return False
    device = next(body.parameters()).device
    # Long enough for a bias by place instead of position to show; 11 divides no block of a sparse attention.
    ids = torch.arange(26, device=device).reshape(2, 13) % body.config.vocab_size
    ids[1, :2] = ids[0, :2]  # the same prompt
    whole = torch.ones_like(ids, dtype=torch.bool)
    positions = torch.arange(13, device=device).expand(2, 13)
    try:
        rows = packed(body, ModelInputs(ids, whole, positions, scored=whole[:, 2:]))
        with evaluating(body):
            separate = body(input_ids=ids, use_cache=True)
            if rows is None or not has_keys_only(getattr(separate, "past_key_values", None)):
                return False  # None: the probe is longer than the window
            found = body(**rows.inputs).last_hidden_state.flatten(0, 1)[rows.states_at]
            with rounding_embeddings(body):
                rounded = body(input_ids=ids, use_cache=False).last_hidden_state
    except UNSUPPORTED:  # such as this mask
        return False
    plain, rounded = (states[:, 1:-1].flatten(0, 1) for states in (separate.last_hidden_state, rounded))
    return same_values(found, plain, rounded)


@torch.no_grad()
def reads_past_only(model: Any) -> bool:
    """Whether the logits of a token depend on earlier tokens only: not on padding, nor on later tokens."""
    device = next(model.parameters()).device
    ids = torch.arange(13, device=device)[None] % model.config.get_text_config().vocab_size
    mask = torch.arange(13, device=device)[None] > 2
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with evaluating(model):
        whole = model(input_ids=ids[:, 3:9], use_cache=False).logits
        padded = model(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False)
        with rounding_embeddings(model):
            rounded = model(input_ids=ids[:, 3:9], use_cache=False).logits
    return same_values(padded.logits[:, 3:9], whole, rounded)


@contextmanager
def rounding_embeddings(model: Any) -> Iterator[None]:
    """Changes the embeddings of all tokens by up to half a unit of rounding inside the block.

    What that changes in the output shows how far rounding changes it: in bf16, 0.5 % in a model of few
    layers, and 8 % in SmolLM2-135M.
    """

    def change(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        noise = torch.rand(output.shape, generator=torch.Generator().manual_seed(0)).to(output.device) - 0.5
        return output * (1.0 + torch.finfo(output.dtype).eps * noise).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def same_values(found: Tensor, plain: Tensor, rounded: Tensor | None = None) -> bool:
    """Whether two results of one computation differ by rounding only.

    `rounded`: `plain` inside `rounding_embeddings`; None: the computation is that of one layer.
    """
    size, tolerance = plain.float().norm(), _TOLERANCE_FP32
    if rounded is not None:  # in 12 models: rounding up to this effect, wrong positions 7 times it
        tolerance = max(tolerance, 3.0 * float((rounded.float() - plain.float()).norm() / size))
    elif plain.dtype != torch.float32:
        tolerance = _TOLERANCE
    return bool((found.float() - plain.float()).norm() < tolerance * size)


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


def widened(values: Tensor, inputs: ModelInputs) -> Tensor:
    """Pads (B, t) of the used response columns to (B, T) with 0.0."""
    return functional.pad(values, (0, inputs.scored.shape[1] - values.shape[1]))


def scored_states(
    body: Any,
    inputs: ModelInputs,
    *,
    packs: bool,
    share_prompts: bool,
    split: Callable[[PackedRows], PackedRows] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """States of a body that predict the N scored tokens, in row order.

    Args:
        body: the model without its head.
        packs: process packed rows, which `body` must support, see `can_pack`.
        share_prompts: if rows are not packed, compute a prompt that adjacent rows share once.
        split: returns this rank's part of packed rows that several ranks share; `packs` must be True.

    Returns:
        (N, H) states and None; with `split`, (M, H) states of this rank's tokens, and (M,) indices of
        these among the N tokens.

    Raises:
        RunFailure: rows that must be split among ranks cannot be packed.
    """
    if packs and (rows := packed(body, inputs)):
        rows = split(rows) if split else rows
        states: Tensor = body(**rows.inputs).last_hidden_state
        return states.flatten(0, 1).index_select(0, rows.states_at), rows.scored_at
    if split:
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
