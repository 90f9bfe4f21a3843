"""Counts collectives and host-device synchronizations per operator; compares the collectives of ranks."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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


#: Functions of torch.distributed that all ranks of a group must call in the same order.
_TOGETHER = (
    *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "_all_gather_base"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "gather", "scatter"),
    *("all_to_all", "all_to_all_single", "broadcast", "barrier", "monitored_barrier", "new_group"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
)
#: Those that move pickled objects, of any size.
_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")

Seen = Callable[[str, list[int], list[torch.Tensor]], bool]


#: Of the last call: numbers of entries from each rank and to each rank, where these differ.
SPLITS: list[list[int]] = []


def _watch(seen: Seen) -> dict[str, Any]:
    """Calls `seen(name, ranks of the group, tensors)` before each collective of this process.

    A collective for which it returns False is not run. Returns the plain functions.
    """
    plain = {name: getattr(dist, name) for name in _TOGETHER}
    splits = SPLITS

    def watched(name: str) -> Callable[..., Any]:
        @wraps(plain[name])
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            group = next((each for each in given if isinstance(each, dist.ProcessGroup)), dist.group.WORLD)
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            splits[:] = (
                [each for each in given if isinstance(each, list)] if name == "all_to_all_single" else []
            )
            if seen(name, dist.get_process_group_ranks(group), [] if name in _OBJECTS else tensors):
                return plain[name](*args, **kwargs)
            return None

        return call

    for name in plain:
        setattr(dist, name, watched(name))
    return plain


def trace(directory: str) -> None:
    """From now on, each collective of this process adds a line to `directory`/RANK.

    The line has its name, the ranks of its group, shape and dtype of each tensor (without the first dimension
    if ranks exchange different numbers of entries), and these numbers.
    """

    def seen(name: str, group: list[int], tensors: list[torch.Tensor]) -> bool:
        kinds = [[*tensor.shape[bool(SPLITS) :], str(tensor.dtype)] for tensor in tensors]
        with Path(directory, os.environ["RANK"]).open("a") as file:
            file.write(json.dumps([name, group, kinds, SPLITS]) + "\n")
        return True

    _watch(seen)


def assert_agree(directory: Path, count: int) -> Counter[str]:
    """Asserts that the members of every group called the same collectives; returns how often each was called.

    Ranks that call different collectives, or with other shapes, wait for each other for ever or mix up data.
    """
    by_group: dict[tuple[int, ...], dict[int, list[Any]]] = defaultdict(dict)
    exchanged: dict[tuple[int, ...], dict[int, list[Any]]] = defaultdict(dict)
    for rank in range(count):
        for line in (directory / str(rank)).read_text().splitlines():
            name, group, kinds, *splits = json.loads(line)
            by_group[tuple(group)].setdefault(rank, []).append((name, kinds))
            exchanged[tuple(group)].setdefault(rank, []).append(splits[0] if splits else [])
    for group, of_ranks in exchanged.items():
        for splits in zip(*of_ranks.values(), strict=False):
            for place in range(len(group) if splits[0] else 0):
                received, sent = splits[place][0], [others[1][place] for others in splits]
                assert received == sent, f"rank {group[place]} of {group} waits for {received}, gets {sent}"
    total: Counter[str] = Counter()
    for group, calls in by_group.items():
        assert tuple(sorted(calls)) == tuple(sorted(group)), f"only {sorted(calls)} of {group} meet"
        first = calls[group[0]]
        for rank in group[1:]:
            for at, (one, other) in enumerate(zip(first, calls[rank], strict=False)):
                assert one == other, (
                    f"call {at} of the group {group}: rank {group[0]} {one}, rank {rank} {other}"
                )
            assert len(first) == len(calls[rank]), f"rank {rank} of {group} makes another number of calls"
        total.update(name for name, _ in first)
    return total


@contextmanager
def only_on(device: torch.device) -> Iterator[None]:
    """Collectives on tensors of other devices raise, as NCCL's do; those on this device do nothing."""

    def seen(name: str, group: list[int], tensors: list[torch.Tensor]) -> bool:
        for tensor in tensors:
            if tensor.device != device:
                raise RuntimeError(f"{name} of a tensor on {tensor.device}, and the group is on {device}")
        return not tensors

    plain = _watch(seen)
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
