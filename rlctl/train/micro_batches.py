"""Splits the rows of a batch into forward passes, by number of rows or by number of tokens.

A forward pass computes the columns that at least one of its rows uses (`engine/inputs.py`). Rows of
different lengths therefore cause padding; rows of similar length do not. A token budget also bounds
the memory of a pass by what it computes, not by the longest possible response.

Rows without gradient come first, so that their forward passes need no backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlctl.engine.ranks import Ranks

if TYPE_CHECKING:
    from rlctl.batch import ModelInputs, Rows


def micro_batches(
    inputs: ModelInputs, rows: int, max_tokens: int | None, ranks: Ranks, *, first: Tensor | None = None
) -> list[Rows]:
    """Rows of each forward pass (part); every row is in exactly one part.

    By tokens, rows are sorted by length, longest first, and packed one after the other while
    number of rows × columns in use stays within the budget. Ranks with fewer parts than others split
    theirs further, because under ZeRO a forward or backward pass is a collective.

    Args:
        inputs: this rank's rows; every rank has the same number.
        rows: rows per part if `max_tokens` is None (the last part may be smaller).
        max_tokens: rows × columns per part; a longer row is a separate part.
        ranks: the processes of the run; all call this.
        first: (B,) bool, rows that the first parts contain. Parts by tokens never mix them with other rows;
            of the parts by number, at most one does, if they fill at least one part. None: any order.
    """
    total, device = len(inputs), inputs.input_ids.device
    if max_tokens is None:
        starts = range(0, total, rows)
        if first is None or int(first.sum()) < rows or len(starts) == 1:  # too few to fill a part
            return [slice(start, min(start + rows, total)) for start in starts]
        order = first.int().argsort(descending=True, stable=True)
        return [order[start : start + rows] for start in starts]
    prompts, responses = _lengths(inputs)
    is_first: list[bool] = [False] * total if first is None else first.tolist()
    parts: list[list[int]] = []
    for which in (True, False):
        parts += _packed(
            [row for row in range(total) if is_first[row] is which], prompts, responses, max_tokens
        )
    count = int(ranks.max(len(parts)))
    while len(parts) < count:
        place = max(range(len(parts)), key=lambda place: len(parts[place]))
        middle = len(parts[place]) // 2
        parts[place : place + 1] = [parts[place][:middle], parts[place][middle:]]
    # Batch order within a part: adjacent rows may share a prompt, which is then computed once.
    return [torch.tensor(sorted(part), device=device) for part in parts]


def in_batch_order(pieces: list[Tensor], parts: list[Rows]) -> Tensor:
    """Joins the results of all parts, each (rows of the part, …), as (B, …) in batch order, detached."""
    number = sum(len(piece) for piece in pieces)
    whole = pieces[0].new_empty((number, *pieces[0].shape[1:]))
    for rows, piece in zip(parts, pieces, strict=True):
        whole[rows] = piece.detach()
    return whole


def _lengths(inputs: ModelInputs) -> tuple[list[int], list[int]]:
    """Per row, the numbers of prompt and response columns that a pass over this row alone would use."""
    width = inputs.scored.shape[1]
    prompts = inputs.attention_mask[:, : inputs.input_ids.shape[1] - width].sum(1).clamp(min=1)
    places = torch.arange(1, width + 1, device=inputs.scored.device)
    responses = (inputs.scored * places).amax(1).clamp(min=1)
    found: list[list[int]] = torch.stack([prompts, responses]).tolist()
    return found[0], found[1]


def _packed(rows: list[int], prompts: list[int], responses: list[int], max_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    prompt = response = 0
    for row in sorted(rows, key=lambda row: -(prompts[row] + responses[row])):
        prompt, response = max(prompt, prompts[row]), max(response, responses[row])
        if parts and (len(parts[-1]) + 1) * (prompt + response) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
            prompt, response = prompts[row], responses[row]
    return parts
