"""Other weights for the trainer's model: of older checkpoints, partly old, or moved on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlctl.mismatch.score import Weights

#: How far the sync check moves each parameter, as a share of its root mean square.
_MOVED_BY = 0.05
HEAD_ONLY = "output head only"


def all_and_head(name: str, state: Callable[[], dict[str, Tensor]]) -> dict[str, Weights]:
    """Two hypotheses: all weights are those of `state`; or, where a sync lost it, the output head alone.

    Args:
        name: of these weights, such as `step 40`.
        state: gives the state dict, when it is needed.
    """

    def put_all(model: Any) -> None:
        model.load_state_dict(state())

    def put_head(model: Any) -> None:
        head = copy.deepcopy(model.get_output_embeddings())
        names = model.state_dict(keep_vars=True).items()
        name = next(name for name, tensor in names if tensor is model.get_output_embeddings().weight)
        head.weight = nn.Parameter(state()[name].to(head.weight), requires_grad=False)
        model.set_output_embeddings(head)  # its own, even where the embeddings' weight is tied to it

    return {name: put_all, f"{name}, {HEAD_ONLY}": put_head}


@torch.no_grad()
def moved(model: Any) -> Any:
    """A copy of the model with every parameter a little different."""
    other = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(0)
    for parameter in other.parameters():
        noise = torch.randn(parameter.shape, generator=draw).to(parameter)
        parameter.add_(_MOVED_BY * parameter.float().square().mean().sqrt().to(parameter) * noise)
    return other
