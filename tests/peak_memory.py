"""Peak memory of live tensors, counted operator by operator, so that it is the same on every machine."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Context manager that counts tensor storages created within it.

    Attributes:
        now: bytes of the live storages.
        peak: maximum of `now`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in given | self._alive:
                self._alive.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _gone(self, key: int, num_bytes: int) -> None:
        self._alive.discard(key)
        self.now -= num_bytes


def _storages(tree) -> list[torch.UntypedStorage]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
    return [tensor.untyped_storage() for tensor in tensors]
