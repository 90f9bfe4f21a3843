"""A change of a model's trained weights that is undone exactly, and the parts of the model to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

#: dtype of weights → integers of the same size, and bits of the mantissa.
_LAYOUTS = {
    torch.float32: (torch.int32, 23),
    torch.bfloat16: (torch.int16, 7),
    torch.float16: (torch.int16, 10),
}


@contextlib.contextmanager
def perturbed(
    model: Any,
    bit: int,
    names: Collection[str] | None = None,
    gathered: Callable[[Sequence[Tensor]], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    before: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Context in which each trained weight differs by about 2^−bit of itself, see `TrainEngine.perturbed`.

    One bit of every mantissa is flipped, and flipped back. Weights that are all 0, as B of a new adapter,
    become 2^−(bit + 2).

    Args:
        gathered: returns a context of the tensors that stand for these weights, and may be changed.
        before: called before each of the two changes.
    """
    masks: dict[str, int] = {}

    def flip() -> None:
        before()
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        for name in trained if names is None else names:
            with gathered([trained[name]]) as [weight]:
                masks.setdefault(name, _mask(weight.data, bit))
                weight.data.view(_LAYOUTS[weight.dtype][0]).bitwise_xor_(masks[name])

    flip()
    try:
        yield
    finally:
        flip()


def _mask(weight: Tensor, bit: int) -> int:
    integers, size = _LAYOUTS[weight.dtype]
    if weight.any():
        return 1 << (size - bit)
    return int(torch.tensor(2.0 ** -(bit + 2), dtype=weight.dtype).view(integers))


def parts_of(model: Any) -> dict[str, list[str]]:
    """Trained parameters of a Hugging Face model by the last component of their layer's name."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    parts: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = name.partition(".lora_")[0].removesuffix(".weight").removesuffix(".bias")
            label = layer.rpartition(".")[2]
            if tied and parameter is embedding.weight:
                label = f"the output head, which is tied to {label}"
            parts.setdefault(label, []).append(name)
    return parts
