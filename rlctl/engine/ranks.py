"""The processes of a run: rank, device, and collectives."""

from __future__ import annotations

import atexit
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, Store
from torch.distributed.rendezvous import rendezvous

from rlctl.algos.segments import LARGEST, HostSums, Sums
from rlctl.engine.launch import STORE
from rlctl.errors import EnvironmentFailure, UsageError, lost_rank
from rlctl.leftovers import own_directory
from rlctl.processes import (
    LOOPBACK,
    NODE_ADDRESS,
    is_loopback,
    note_progress,
    own_address,
    use_interface,
)
from rlctl.run_spec.machine import gpus, gpus_are_hidden
from rlctl.run_spec.run_spec import RunSpec

_Value = TypeVar("_Value")

#: Added to the run's own time limit, whose error is more informative than a timeout of torch.
_GRACE = timedelta(minutes=5)
#: Seconds between two looks whether rank 0 is ready.
_PAUSE_S = 1.0
#: Environment variables that torchrun would set for a single rank.
_SINGLE_RANK_ENV = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
#: Environment variable with the file to which NCCL writes; `%p`: its process.
_NCCL_LOG = "NCCL_DEBUG_FILE"
#: With 1, vLLM forms the groups of an engine in this process by one split per kind, not one by one, which
#: needs a group that also has gloo.
_SPLITS_GROUPS = "VLLM_DISTRIBUTED_USE_SPLIT_GROUP"
#: Ranks from which vLLM's groups are split by default: each of the thousands of groups that it would form one
#: by one waits for all ranks.
_SPLITS_FROM = 256
#: Set if a single rank set these variables itself.
_IS_ALONE = "RLCTL_ALONE"


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all processes of a run.

    Attributes:
        rank: 0-based, over all machines; rank 0 writes files and shows progress.
        device: the device this rank computes on.
        group: torch's process group if these are only some of the run's ranks; None: all.
    """

    rank: int
    world_size: int
    device: torch.device
    group: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.rank == 0 and self.group is None

    def barrier(self) -> None:
        """Waits until every rank has called it."""
        if self.world_size > 1:
            dist.barrier(self.group)

    def all_reduce(self, sums: Sums) -> HostSums:
        """The sums over all ranks as floats: two collectives, one transfer. All ranks have the same names."""
        reduced: HostSums = {}
        for largest, op in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
            names = [name for name in sums if name.endswith(LARGEST) is largest]
            if names:
                values = torch.stack([sums[name].double() for name in names])
                if self.world_size > 1:
                    dist.all_reduce(values, op=op, group=self.group)
                reduced |= dict(zip(names, values.tolist(), strict=True))
        return reduced

    def max(self, value: float) -> float:
        """Maximum of the values of all ranks."""
        return self._reduced([value], dist.ReduceOp.MAX)[0]

    def min(self, value: float) -> float:
        """Minimum of the values of all ranks."""
        return -self.max(-value)

    def sum(self, values: list[float]) -> list[float]:
        """Sum of each value over all ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: list[float], op: Any) -> list[float]:
        if self.world_size == 1:
            return values
        at: Tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(at, op=op, group=self.group)
        reduced: list[float] = at.tolist()
        return reduced

    def first(self, text: str) -> str:
        """The first text in rank order that is not empty; "" if all are empty."""
        return next(filter(None, self.exchange([text])), "")

    def all_gather(self, values: Tensor) -> Tensor:
        """Concatenated values (N, …) of all ranks, in rank order; N may differ between ranks."""
        if self.world_size == 1:
            return values
        sizes = [int(size) for size in self.exchange([len(values)])]
        padded = values.new_zeros((max(sizes), *values.shape[1:]))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def all_to_all(self, parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Sends part r (N_r, …) to rank r, and returns what each rank sends to this one.

        Args:
            sizes: number of entries that each rank sends to this one.
        """
        if self.world_size == 1:
            return parts
        sent = torch.cat(parts).contiguous()
        dtype = sent.dtype
        if dtype in (torch.bool, torch.int16):  # no backend sends them
            sent = sent.view(torch.uint8)
        received = sent.new_empty((sum(sizes), *sent.shape[1:]))
        dist.all_to_all_single(received, sent, sizes, [len(x) for x in parts], group=self.group)
        return list(torch.split(received.view(dtype), sizes))

    def exchange(self, values: list[_Value]) -> list[_Value]:
        """Values of all ranks, in rank order, on every rank."""
        parts: list[list[_Value]] = [values] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(parts, values, group=self.group)
        return [value for part in parts for value in part]

    def from_main(self, value: _Value) -> _Value:
        """The value of rank 0, on every rank; the others' are ignored."""
        held = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(held, group=self.group, group_src=0)
        return held[0]


def join_ranks(
    timeout_s: float = 1500.0, *, on_loopback: bool = True, first: Callable[[], object] = lambda: None
) -> Ranks:
    """Joins the process group that a launcher describes in the environment, or creates one of one rank.

    Only a launcher of several machines has ranks meet at a port. For DeepSpeed and vLLM, a single rank sets
    the variables that torchrun would set.

    Args:
        timeout_s: maximum time that ranks should wait for one another.
        on_loopback: all processes that take part in collectives, rollout servers included, are on this
            machine: gloo and NCCL use its loopback interface. On several nodes they use the interface on the
            route to `MASTER_ADDR`. The environment can name another one.
        first: what rank 0 of a launcher does before ranks join, for any time, such as a download.

    Raises:
        UsageError: there are more ranks on this machine than GPUs.
        EnvironmentFailure: there is a GPU that torch cannot use.
    """
    refuse_idle_gpu()
    if "RANK" not in os.environ:
        os.environ |= _SINGLE_RANK_ENV | {_IS_ALONE: "1"}
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        if local_rank >= (num_gpus := torch.cuda.device_count()):
            message = f"rank {local_rank} of this machine has no GPU: the machine has {num_gpus}"
            raise UsageError(message, where="trainer.n_gpus_per_node", fix=f"set it to {num_gpus} or less")
        device = torch.device("cuda", local_rank)
        backend = "nccl"
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s) + _GRACE
        module = cast(Any, dist.distributed_c10d)
        # Groups that DeepSpeed and vLLM form would have 10 minutes with NCCL.
        module.default_pg_timeout = module.default_pg_nccl_timeout = timeout
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
        store = _store(rank, world_size, timeout)
        if _at_port():
            _wait_for(store, rank, first)
        if on_loopback:
            use_interface(LOOPBACK)
        elif _at_port():
            os.environ.setdefault(NODE_ADDRESS, _address(store, rank, world_size))
            use_interface(os.environ[NODE_ADDRESS])
            if backend == "nccl" and "NCCL_DEBUG" not in os.environ:
                os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
                os.environ.setdefault(_NCCL_LOG, f"{own_directory('nccl')[0]}/%p.log")
        has_gloo = backend == "nccl" and os.environ.get(_SPLITS_GROUPS) == "1"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gloo else backend,
            timeout=timeout,
            store=store,
            rank=rank,
            world_size=world_size,
            # NCCL connects now, where its errors are expected, not in the first collective.
            device_id=device if backend == "nccl" else None,
        )
    return current_ranks(device)


def split_groups_of_vllm(spec: RunSpec) -> None:
    """Has vLLM, in each of many ranks with a GPU, split the ranks into groups; call before `join_ranks`.

    It refuses to do so in a group without a GPU. A value that the user has set stays.
    """
    if _forms_many_groups(spec):
        os.environ.setdefault(_SPLITS_GROUPS, "1")


def _forms_many_groups(spec: RunSpec) -> bool:
    has_many = spec.samples_in_ranks_with_vllm and spec.world_size >= _SPLITS_FROM
    return has_many and torch.cuda.is_available()


def group_notes(spec: RunSpec) -> list[str]:
    """How vLLM in the ranks forms its groups, if these are many."""
    if not _forms_many_groups(spec):
        return []
    # vLLM 0.32 forms two groups for each rank and each of six kinds of parallelism, and two of all ranks.
    one_by_one = f"{12 * spec.world_size + 2:,} groups on each rank, one by one"
    if os.environ.get(_SPLITS_GROUPS) != "1":
        return [f"warning: vLLM forms {one_by_one}; {_SPLITS_GROUPS}=1 splits the ranks 14 times instead"]
    note = f"vLLM splits the ranks into groups 14 times ({_SPLITS_GROUPS}=1)"
    return [f"{note}; with 0 it forms {one_by_one}, which is slow and needs no gloo beside NCCL"]


def network_notes() -> list[str]:
    """The network by which NCCL connects this node to others; empty on one node, or if NCCL does not say."""
    path = Path(os.environ.get(_NCCL_LOG, "").replace("%p", str(os.getpid())))
    log = path.read_text(errors="replace") if path.is_file() else ""
    found = re.findall(r"NET/(\w+) : Using (.+)", log)
    used = [f"NCCL connects nodes by {network}: {devices.strip()}" for network, devices in found]
    if used and all(network == "Socket" for network, _ in found):
        used[0] += (
            ". Without InfiniBand collectives are several times slower: see “Docker” in docs/how-to/scale.md"
        )
    return used[:1]


def _at_port() -> bool:
    """Whether the ranks meet at a port of the launcher."""
    return not {STORE, _IS_ALONE} & os.environ.keys()


def _store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Where the ranks exchange their addresses."""
    if _at_port():
        store: Store = next(rendezvous("env://", rank, world_size, timeout=timeout))[0]
        return store
    return FileStore(os.environ[STORE], world_size) if STORE in os.environ else HashStore()


def _wait_for(store: Store, rank: int, first: Callable[[], object]) -> None:
    """Runs `first` on rank 0. The others wait without a limit for its end, not for its start."""
    if rank == 0:
        store.set("first/begins", "")
        first()
        store.set("first/ends", "")
        return
    store.wait(["first/begins"])
    while not store.check(["first/ends"]):
        note_progress()  # not a hang
        time.sleep(_PAUSE_S)


def _address(store: Store, rank: int, world_size: int) -> str:
    """This node's address in the run's network.

    It is the one on the route to `MASTER_ADDR`; on node 0, whose own name may mean its loopback interface
    only (`127.0.1.1`), the one on the route to the last rank.
    """
    own = own_address([os.environ["MASTER_ADDR"]])
    store.set(f"address/{rank}", own)
    return own_address([store.get(f"address/{world_size - 1}").decode()]) if is_loopback(own) else own


def refuse_idle_gpu() -> None:
    """Refuses to compute on the CPU if torch cannot use the machine's GPU, unless all GPUs are hidden.

    Raises:
        EnvironmentFailure: the driver reports a GPU, and torch finds none.
    """
    if torch.cuda.is_available() or gpus_are_hidden() or not (found := gpus()):
        return
    if torch.version.cuda is None:
        message = f"torch is built without CUDA, and cannot use {found[0]}"
        fix = "install torch's CUDA build"
    else:
        built = f"torch is built for CUDA {torch.version.cuda}"
        message = f"{built}, and finds no GPU, but the driver lists {found[0]}"
        fix = "update the driver, or install a torch built for the CUDA that `nvidia-smi` names"
    raise EnvironmentFailure(message, fix=f"{fix}; to use the CPU, set CUDA_VISIBLE_DEVICES=")


def current_ranks(device: torch.device) -> Ranks:
    """The ranks of torch's default process group, whoever initialised it; without one, a single rank."""
    if not dist.is_initialized():
        return Ranks(0, 1, device)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


@contextmanager
def missing_ranks() -> Iterator[None]:
    """Turns connection errors into `LostRank`: if a rank dies, all others fail in their next collective.

    Raises:
        LostRank: instead of the process group's own error.
    """
    try:
        yield
    except RuntimeError as error:
        lost = lost_rank(error)
        if lost:
            raise lost from error
        raise


def leave_ranks() -> None:
    """Leaves the process group, if one was joined; all ranks must call it.

    Under NCCL, a failed rank that leaves would wait for the others, and they for it. It should exit
    instead.
    """
    if os.environ.get(_IS_ALONE):  # DeepSpeed keeps the group; another run in this process reuses it
        atexit.register(_destroy_group)
    else:
        _destroy_group()


def clear_single_rank_env() -> None:
    """Removes the variables of a single rank: the next run in this process may have more ranks."""
    if os.environ.pop(_IS_ALONE, None):
        for name in _SINGLE_RANK_ENV:
            os.environ.pop(name, None)


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
