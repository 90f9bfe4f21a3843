"""Counts collectives and host-device synchronizations per operator."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators that copy a value or a size from the device to the host.
_SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}
_METHODS = ("tolist", "numpy", "cpu")


class Recorder(TorchDispatchMode):
    """Context manager that counts collectives and synchronizations, including backward passes on the CPU.

    Attributes:
        calls: collective → number of calls.
        num_bytes: collective → bytes of the largest tensor of each call, summed over the calls.
        sizes: (collective, number of elements of its largest tensor) → number of calls.
        syncs: operator or method → number of calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.sizes: Counter[tuple[str, int]] = Counter()
        self.syncs: Counter[str] = Counter()

    def counts(self) -> dict[str, dict]:
        """All attributes as plain dicts."""
        return {name: dict(getattr(self, name)) for name in ("calls", "num_bytes", "sizes", "syncs")}

    def __enter__(self):
        self._plain = {name: getattr(torch.Tensor, name) for name in _METHODS}
        for name, method in self._plain.items():
            setattr(torch.Tensor, name, self._counted(name, method))
        return super().__enter__()

    def __exit__(self, *exception):
        for name, method in self._plain.items():
            setattr(torch.Tensor, name, method)
        return super().__exit__(*exception)

    def _counted(self, name, method):
        def counted(*args, **kwargs):
            self.syncs[name] += 1
            return method(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.calls[name] += 1
            self.num_bytes[name] += max((tensor.nbytes for tensor in tensors), default=0)
            self.sizes[name, max((tensor.numel() for tensor in tensors), default=0)] += 1
        elif name in _SYNCS:
            self.syncs[name] += 1
        elif name.startswith("index"):  # with a mask, the size of the result depends on its values
            masks = [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, torch.Tensor)]
            self.syncs["index by a mask"] += any(mask.dtype == torch.bool for mask in masks)
        return func(*args, **kwargs)
