"""Weights on their way from the trainer to a rollout engine: all there, known, and of the right shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
