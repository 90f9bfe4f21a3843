"""Tensor parallelism over the GPUs of several ranks, which process their requests together.

vLLM's `external_launcher` gives every rank an engine with its shards of the weights. The engines of a group
stay synchronised if each receives the same requests in the same order. Ranks may make different numbers of
calls, so they work in rounds until no rank has a request left:

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
#: Runs requests on this rank's engine and returns vLLM's outputs in their order.
Answer = Callable[[list[Asked]], list[Any]]


class TensorParallelGroup:
    """Consecutive ranks that share one model; every rank of the run creates its group at the same time.

    Args:
        size: ranks per group; divides the number of ranks.
    """

    def __init__(self, size: int) -> None:
        all_ranks = list(range(dist.get_world_size()))
        own = dist.get_rank()
        # `new_group` must be called for every group on every rank. gloo exchanges token lists in host memory.
        parts = [all_ranks[first : first + size] for first in all_ranks[::size]]
        groups = [dist.new_group(part, backend="gloo") for part in parts]
        self._group = groups[own // size]
        self._rank = own % size
        self._size = size

    def ask(self, asked: list[Asked], answer: Answer, version: int | None) -> list[Any]:
        """Runs one round and returns the outputs of this rank's requests.

        Args:
            asked: the requests of this rank.
            answer: called on all ranks with the requests of all.
            version: weight version of this rank's shards.

        Raises:
            RunFailure: on every rank: shards have different versions, or ranks sampled different tokens.
            RuntimeError: from torch, if another rank has ended.
        """
        return self._round(asked, answer, version) or []

    def finish(self, answer: Answer, version: int | None) -> None:
        """Processes the other ranks' requests until no rank has any left; see `ask`."""
        while self._round(None, answer, version) is not None:
            pass

    def _round(self, asked: list[Asked] | None, answer: Answer, version: int | None) -> list[Any] | None:
        """The outputs of this rank's requests; None: all ranks have finished."""
        versions, requests = zip(*self._exchange((version, asked)), strict=True)
        if len(set(versions)) > 1:
            message = f"the ranks of one engine hold weights of different versions: {versions}"
            raise RunFailure(message, where=_KEY)
        if all(theirs is None for theirs in requests):
            return None
        parts = [theirs or [] for theirs in requests]
        outputs = answer([request for part in parts for request in part])
        # An error above ends this rank, and then the others: ranks that still compute cannot be notified.
        if len(set(self._exchange(_digest(outputs)))) > 1:
            message = "the ranks of one engine sampled different tokens for the same requests"
            raise RunFailure(message, where=_KEY, fix="set it to 1, or set rollout.mode: server")
        first = sum(len(part) for part in parts[: self._rank])
        return outputs[first : first + len(parts[self._rank])]

    def _exchange(self, value: _Value) -> list[_Value]:
        """The values of all ranks of the group, in the order of ranks."""
        values = [value] * self._size
        dist.all_gather_object(values, value, group=self._group)
        return values


def _digest(outputs: list[Any]) -> str:
    """Hash of all sampled tokens, in order."""
    found = hashlib.sha256()
    for output in outputs:
        tokens = output.outputs[0].token_ids
        found.update(array("q", [len(tokens), *tokens]).tobytes())
    return found.hexdigest()
