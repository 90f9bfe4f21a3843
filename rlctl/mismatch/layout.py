"""Prompts and responses as the rows a model reads: the trainer's way, and ways that are mistakes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlctl.batch import ModelInputs
from rlctl.mismatch.scoring_variant import OWN

#: Name of each mistake, and what it does.
POSITION_MISTAKES: Mapping[str, str] = {
    "jump": "the response's positions go on from the padded width of the prompt, not from its length",
    "padding seen": "attention reads the prompts' padding",
    "counted": "position ids count the padding to the left of a prompt",
}


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids (B, P) int64 and their mask (B, P) bool."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return ids, mask


def lay_out(
    prompts: Sequence[Sequence[int]],
    responses: Tensor,
    attended: Tensor,
    scored: Tensor,
    pad_id: int,
    positions: str = OWN,
) -> ModelInputs:
    """B prompts and responses (B, T), of which `attended` (B, T) are read, as `positions` has it."""
    prompt_ids, prompt_mask = left_padded(prompts, pad_id)
    device, width = responses.device, prompt_ids.shape[1]
    prompt_ids, prompt_mask = prompt_ids.to(device), prompt_mask.to(device)
    attention_mask = torch.cat([prompt_mask, attended], dim=1)
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    columns = torch.arange(width + responses.shape[1], device=device).expand_as(attention_mask)
    if positions == "jump":
        position_ids[:, width:] = columns[:, width:]
    elif positions == "counted":
        position_ids = columns
    elif positions == "padding seen":
        position_ids = columns
        attention_mask = torch.cat([torch.ones_like(prompt_mask), attended], dim=1)
    return ModelInputs(torch.cat([prompt_ids, responses], dim=1), attention_mask, position_ids, scored)
