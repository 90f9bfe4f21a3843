"""Weights on their way from the trainer to a rollout engine: all there, known, and of the right shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from rlctl.errors import RunFailure


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """A `Policy` without adapters: its weights and nothing else.

    Attributes:
        named_tensors: all of them, by the names of the model's `state_dict()`.
    """

    named_tensors: Iterable[tuple[str, Tensor]]

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.weights`; they are the same, merged or not."""
        del merged
        return iter(self.named_tensors)

    def adapter(self) -> NoReturn:
        """There is none.

        Raises:
            ValueError: always.
        """
        raise ValueError("these weights have no adapter")


def _as_saved(model: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """What turns a weight of a model into what `save_pretrained` would write of it."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return lambda weight: weight
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # not read from files
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions or any(len(each.target_patterns) > 1 for each in conversions):
        return lambda weight: weight  # a weight of the files is made of several of the model's: none is alone
    return partial(revert_weight_conversion, model)


class ExpectedWeights:
    """What a complete set of a model's weights holds; tied names are one weight.

    Args:
        model: a Hugging Face model, not yet wrapped by a training engine; its weights may be cut up.
    """

    def __init__(self, model: Any) -> None:
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        names: dict[int, list[str]] = {}
        for name, tensor in state.items():
            names.setdefault(id(tensor), []).append(name)
        # `ds_shape`: DeepSpeed's, of a weight that is cut up among the ranks.
        self._shapes = {name: tuple(getattr(part, "ds_shape", part.shape)) for name, part in state.items()}
        self._names = {name: tuple(names[id(tensor)]) for name, tensor in state.items()}
        self._needed = [name for name, tensor in state.items() if isinstance(tensor, nn.Parameter)]
        self._as_saved = _as_saved(model)

    def in_files(
        self, named_tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """As `checked`, by the names and in the parts of the model's files, which is what engines load.

        transformers may hold a model otherwise than its files do: experts in one tensor, modules renamed.
        """
        for names, tensor in self.checked(named_tensors):
            first, *tied = [self._as_saved({name: tensor}) for name in names]
            for name, part in first.items():
                yield (name, *(next(iter(other)) for other in tied)), part

    def checked(
        self, named_tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Each weight with all its names, as it comes; what is wrong is said at the end, all at once.

        Raises:
            RunFailure: a weight is missing, unknown or of another shape. By then the others have been
                passed on: an engine that took them is a mixture.
        """
        covered: set[str] = set()
        wrong: list[str] = []
        for name, tensor in named_tensors:
            shape = self._shapes.get(name)
            if shape is None:
                wrong.append(f"{name} is unknown")
            elif shape != tuple(tensor.shape):
                wrong.append(f"{name} has shape {tuple(tensor.shape)} instead of {shape}")
            else:
                covered.update(self._names[name])
                yield self._names[name], tensor
        wrong += [f"{name} is missing" for name in self._needed if name not in covered]
        if wrong:
            raise RunFailure(f"weight sync to the rollout engine failed: {'; '.join(wrong)}")
