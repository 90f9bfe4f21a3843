"""Prompts and responses as the rows a model reads: the trainer's way, and ways that are mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.mismatch.scoring_variant import OWN

#: Name of each mistake, and what it does.
POSITION_MISTAKES: Mapping[str, str] = {
    "jump": "the response's positions go on from the padded width of the prompt, not from its length",
    "padding seen": "attention reads the prompts' padding",
    "counted": "position ids count the padding to the left of a prompt",
}


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """What a model reads.

    Attributes:
        input_ids, position_ids: (B, L) int64, prompts padded on the left, the response the last T columns.
        attention_mask: (B, L) bool.
        horizon: T.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    horizon: int


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids (B, P) int64 and their mask (B, P) bool."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return ids, mask


def lay_out(
    prompts: Sequence[Sequence[int]], responses: Tensor, mask: Tensor, pad_id: int, positions: str = OWN
) -> PaddedRows:
    """B prompts and responses (B, T) with their mask (B, T), as `positions` has it."""
    prompt_ids, prompt_mask = left_padded(prompts, pad_id)
    device, horizon, width = responses.device, responses.shape[1], prompt_ids.shape[1]
    prompt_ids, prompt_mask = prompt_ids.to(device), prompt_mask.to(device)
    attention_mask = torch.cat([prompt_mask, mask], dim=1)
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    columns = torch.arange(width + horizon, device=device).expand_as(attention_mask)
    if positions == "jump":
        position_ids[:, width:] = columns[:, width:]
    elif positions == "counted":
        position_ids = columns
    elif positions == "padding seen":
        position_ids = columns
        attention_mask = torch.cat([torch.ones_like(prompt_mask), mask], dim=1)
    return PaddedRows(torch.cat([prompt_ids, responses], dim=1), attention_mask, position_ids, horizon)
