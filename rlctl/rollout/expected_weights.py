"""The weights that an engine gets from the policy: complete, of the right shapes, by their names in files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from rlctl.errors import RunFailure
from rlctl.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Text models that vLLM gives no output head: it applies their embedding.
_WITHOUT_HEAD = ("gemma2", "gemma3n_text")


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """A `Policy` without adapters.

    Attributes:
        named_tensors: all weights, by their names in the model's `state_dict()`.
    """

    named_tensors: Iterable[tuple[str, Tensor]]

    def weights(self, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.weights`; `merged` has no effect."""
        del merged
        return iter(self.named_tensors)

    def adapter(self) -> NoReturn:
        """Not supported.

        Raises:
            ValueError: always.
        """
        raise ValueError("these weights have no adapter")


def _as_saved(model: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Returns a function that converts a weight of the model to the form `save_pretrained` would write."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return lambda weight: weight
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # the model was not loaded from files
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions or any(len(each.target_patterns) > 1 for each in conversions):
        return lambda weight: weight  # a file's weight combines several of the model's: unsupported
    return partial(revert_weight_conversion, model)


class ExpectedWeights:
    """Names and shapes of a complete set of a model's weights; tied names are one weight.

    Args:
        model: a Hugging Face model, not yet wrapped by a training engine; its weights may be partitioned.
    """

    def __init__(self, model: Any) -> None:
        state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        names: dict[int, list[str]] = {}
        for name, tensor in state.items():
            names.setdefault(id(tensor), []).append(name)
        # `ds_shape`: DeepSpeed's full shape of a weight that is partitioned among the ranks.
        self._shapes = {name: tuple(getattr(part, "ds_shape", part.shape)) for name, part in state.items()}
        self._names = {name: tuple(names[id(tensor)]) for name, tensor in state.items()}
        self._as_saved = _as_saved(model)
        config = getattr(model, "config", None)
        self._has_head = config is None or config.get_text_config().model_type not in _WITHOUT_HEAD

    def in_files(
        self, named_tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Like `checked`, but with the names and tensors of the model's files, which engines load.

        In memory, transformers may represent a model differently: experts in one tensor, modules renamed.
        Tied weights have the first of their names only, as in files. On CPUs they have all names, because
        engines run them untied, see `rlctl.rollout.vllm`; except if vLLM's model has no head.
        """
        most = 1 if torch.cuda.is_available() or not self._has_head else None
        for names, tensor in self.checked(named_tensors):
            first, *tied = [self._as_saved({name: tensor}) for name in names[:most]]
            for name, part in first.items():
                yield (name, *(next(iter(other)) for other in tied)), part

    def checked(
        self, named_tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yields each correct weight with all its names; raises one error for all others at the end.

        Raises:
            RunFailure: a weight is missing, unknown or of another shape. The correct ones have been yielded
                by then, so an engine that loaded them has a mixture of old and new weights.
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
        wrong += [f"{name} is missing" for name in self._shapes if name not in covered]
        if wrong:
            raise RunFailure(f"weight sync to the rollout engine failed: {'; '.join(wrong)}")
