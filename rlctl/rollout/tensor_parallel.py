"""One model over the GPUs of several ranks: they bring their requests together and answer them together.

vLLM's `external_launcher` gives every rank a whole engine with its shards of the weights. The engines of a
group stay in step if each gets the same requests in the same order. Ranks may ask unequally often, so they
meet in rounds until none of them has a request left:

    rank 0   ask      ask      finish ┄┄┄ returns
    rank 1   ask      finish ┄┄┄┄┄┄┄┄┄┄┄┄ returns
    round    both's   rank 0's  none's
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rlctl.errors import RunFailure

_KEY = "rollout.tensor_model_parallel_size"
_Value = TypeVar("_Value")

#: A prompt's tokens, and vLLM's sampling parameters by name.
Asked = tuple[list[int], dict[str, Any]]
#: Has the engine of this rank answer requests: vLLM's outputs, in their order.
Answer = Callable[[list[Asked]], list[Any]]


class TensorParallelGroup:
    """Consecutive ranks whose engines are one; every rank of the run makes its own at the same time.

    Args:
        size: ranks of a group; it divides their number.
    """

    def __init__(self, size: int) -> None:
        all_ranks, own = list(range(dist.get_world_size())), dist.get_rank()
        # Every rank makes every group. Lists of tokens are exchanged through host memory.
        parts = [all_ranks[first : first + size] for first in all_ranks[::size]]
        groups = [dist.new_group(part, backend="gloo") for part in parts]
        self._group, self._rank, self._size = groups[own // size], own % size, size

    def ask(self, asked: list[Asked], answer: Answer, version: int | None) -> list[Any]:
        """One round; the outputs of this rank's requests.

        Args:
            asked: what this rank wants to know.
            answer: called on all ranks with the requests of all.
            version: of the weights of this rank's shards.

        Raises:
            RunFailure: on every rank; shards of different versions, or ranks that sampled different tokens.
            RuntimeError: torch's, where another rank has ended.
        """
        return self._round(asked, answer, version) or []

    def finish(self, answer: Answer, version: int | None) -> None:
        """Answer the others' requests until none of them has any left; see `ask`."""
        while self._round(None, answer, version) is not None:
            pass

    def _round(self, asked: list[Asked] | None, answer: Answer, version: int | None) -> list[Any] | None:
        """The outputs of this rank's requests; None: no rank asked."""
        versions, everyones = zip(*self._exchange((version, asked)), strict=True)
        if len(set(versions)) > 1:
            what = f"the ranks of one engine hold weights of different versions: {versions}"
            raise RunFailure(what, where=_KEY)
        if all(theirs is None for theirs in everyones):
            return None
        parts = [theirs or [] for theirs in everyones]
        outputs = answer([request for part in parts for request in part])
        # An error above ends this rank, and then the others: one that still computes cannot be told.
        if len(set(self._exchange(_digest(outputs)))) > 1:
            what = "the ranks of one engine sampled different tokens for the same requests"
            raise RunFailure(what, where=_KEY, fix="set it to 1, or set rollout.mode: server")
        first = sum(len(part) for part in parts[: self._rank])
        return outputs[first : first + len(parts[self._rank])]

    def _exchange(self, value: _Value) -> list[_Value]:
        """Every rank's value, in the order of ranks."""
        values = [value] * self._size
        dist.all_gather_object(values, value, group=self._group)
        return values


def _digest(outputs: list[Any]) -> str:
    """Of all sampled tokens, in order."""
    found = hashlib.sha256()
    for output in outputs:
        for response in output.outputs:
            found.update(array("q", [len(response.token_ids), *response.token_ids]).tobytes())
    return found.hexdigest()
