"""Machines that a run can be planned for, detected without torch; the default precision of a run."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from rlctl.digits import whole_number
from rlctl.errors import UsageError
from rlctl.leftovers import SHARED_MEMORY
from rlctl.processes import command_output
from rlctl.run_spec.cards import CARDS, Card, card_named

GIB = 2**30
#: Name of the machine that the command runs on.
THIS_MACHINE = "this machine"
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
#: Memory in use of this process's control group, and its parts, under versions 2 and 1.
_CGROUP_USES = (
    Path("/sys/fs/cgroup/memory.current"),
    Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_CGROUP_PARTS = (Path("/sys/fs/cgroup/memory.stat"), Path("/sys/fs/cgroup/memory/memory.stat"))
#: NVIDIA GPUs support bf16 from this compute capability on (Ampere).
_BF16_CAPABILITY = 8.0
#: Flags of CPUs with bf16 arithmetic; without one of them torch emulates it, many times slower than fp32.
_BF16_FLAGS = {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512-BF16"}
_CPU_INFO = Path("/proc/cpuinfo")
#: Per CPU core: float32 matrix products in FLOP/s, and memory bandwidth in bytes/s.
_CORE_FLOPS, _CORE_BANDWIDTH = 70e9, 10e9


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware of a run; speeds are the vendors' peak figures except `flops`."""

    name: str
    gpu: str  # name of its GPUs
    gpus: int  # GPUs per node; 0: the run uses the CPU
    nodes: int
    gpu_bytes: float  # memory of one GPU
    host_bytes: float  # host memory of one node that the run may use
    shm_bytes: float  # size of a node's `/dev/shm`
    flops: float  # FLOP/s that large bf16 products reach on one GPU; 0: unknown, like the next three
    gpu_bandwidth: float  # bytes/s between a GPU and its memory
    link: float  # bytes/s from a GPU to another one of the same node
    bus: float  # bytes/s between a GPU and the host
    network: float  # bytes/s from a GPU to another node
    host_bandwidth: float  # bytes/s between a node's CPUs and its memory
    has_fp8: bool = False  # whether its GPUs multiply numbers of 8 bits

    @property
    def knows_speed(self) -> bool:
        """Whether the speeds are known: without them no seconds are estimated."""
        return self.flops > 0


def _speeds(card: Card) -> tuple[float, float, float, float]:
    return card.flops, card.bandwidth, card.link, card.bus


_SPEEDS = _speeds(CARDS["h100"])
_H100 = Machine(
    "1xh100", "H100 80 GB", 1, 1, 79.6 * GIB, 240 * GIB, 120 * GIB, *_SPEEDS, 50e9, 250e9, has_fp8=True
)
_8XH100 = replace(
    _H100, name="8xh100", gpus=8, host_bytes=2000 * GIB, shm_bytes=1000 * GIB, host_bandwidth=500e9
)
#: Name for `--machine` → machine. GPU memory as the driver reports it; hosts as cloud providers offer them.
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _H100,
        _8XH100,
        replace(_8XH100, name="2x8h100", nodes=2),
        replace(_H100, name="1xh200", gpu="H200 141 GB", gpu_bytes=140.4 * GIB, gpu_bandwidth=4.8e12),
        Machine(
            "1x24gb", "24 GB", 1, 1, 23.6 * GIB, 64 * GIB, 32 * GIB, *_speeds(CARDS["rtx4090"]), 3e9, 60e9
        ),
    )
}
#: Further names: number of nodes (1 if left out), GPUs per node, a card of `cards.toml`.
_NAME = re.compile(r"(?:(\d+)x)?(\d+)x?([a-z][a-z0-9-]*)")
#: Network in bytes/s per GPU: of machines whose GPUs have a faster link than the host's bus, and of others.
_NETWORKS = (50e9, 3e9)


def gib(num_bytes: float) -> str:
    """E.g. `1.5 GiB` or `20.0 MiB`."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.1f} MiB"


def machine_of(name: str | None) -> Machine:
    """The machine of that name; None: this one.

    Raises:
        UsageError: the name is unknown.
    """
    if name is None:
        return this_machine()
    if name in MACHINES:
        return MACHINES[name]
    match = _NAME.fullmatch(name)
    nodes, gpus = (whole_number(match[number] or "1") for number in (1, 2)) if match else (None, None)
    if not match or match[3] not in CARDS or not nodes or not gpus:
        fix = f"choose from {', '.join(MACHINES)}; or write a number of GPUs and a card, such as 4xa100: "
        raise UsageError(f"no machine {name:.50}", where="--machine", fix=fix + ", ".join(CARDS))
    card = CARDS[match[3]]
    network = _NETWORKS[0] if card.link > card.bus else _NETWORKS[1]
    host = gpus * card.host
    sizes = (card.memory, host, host / 2)
    return Machine(
        name, card.name.upper(), gpus, nodes, *sizes, *_speeds(card), network, 60e9 * gpus, card.has_fp8
    )


@cache
def this_machine() -> Machine:
    """Hardware of this machine; host memory is the physical memory or the container's limit, if lower."""
    import psutil

    limits = [float(psutil.virtual_memory().total)]
    for path in _CGROUP_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        limits += [float(text)] if text.isdecimal() else []
    host = min(limits)
    shm = os.statvfs(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    shm_bytes = float(shm.f_frsize * shm.f_blocks) if shm else 0.0
    cards = [] if gpus_are_hidden() else gpus()
    if not cards:
        cores = psutil.cpu_count(logical=False) or 1
        flops = cores * _CORE_FLOPS
        bandwidth = cores * _CORE_BANDWIDTH
        links = (bandwidth, bandwidth, bandwidth, 1e9, bandwidth)
        return Machine(THIS_MACHINE, "CPU", 0, 1, host, host, shm_bytes, flops, *links)
    model = cards[0].split(",")[0].strip()
    speeds = gpu_speeds(model) or (0.0,) * 4
    has_fp8 = bool((card := card_named(model)) and card.has_fp8)
    gpu_bytes = gpu_memory(cards[0]) or host  # the driver reports none if the GPU shares the host's memory
    count = len(cards)
    network = 12e9
    host_bandwidth = 60e9 * max(1, count // 2)
    sizes = (gpu_bytes, host, shm_bytes)
    return Machine(THIS_MACHINE, model, count, 1, *sizes, *speeds, network, host_bandwidth, has_fp8)


def free_host_bytes() -> float:
    """Host memory that processes can still take: of this machine, or of the container if less is left."""
    import psutil

    free = [float(psutil.virtual_memory().available)]
    for limit, use, parts in zip(_CGROUP_LIMITS, _CGROUP_USES, _CGROUP_PARTS, strict=True):
        texts = [path.read_text() if path.is_file() else "" for path in (limit, use, parts)]
        most, used = (text.strip() for text in texts[:2])
        if most.isdecimal() and used.isdecimal():
            sizes = dict(line.split() for line in texts[2].splitlines())
            # Pages of files can be given up, but not those in /dev/shm.
            cached = float(sizes.get("file", sizes.get("total_cache", 0)))
            shared = float(sizes.get("shmem", sizes.get("total_shmem", 0)))
            free.append(float(most) - float(used) + cached - shared)
    return min(free)


def gpu_speeds(model: str) -> tuple[float, float, float, float] | None:
    """`flops`, `gpu_bandwidth`, `link` and `bus` of the GPU of this name; None if it is not in the table."""
    card = card_named(model)
    return None if card is None else _speeds(card)


def native_dtype() -> tuple[Literal["fp32", "bf16"], str]:
    """Returns bf16 if the hardware of this machine supports it, else fp32; and the reason."""
    if not gpus_are_hidden() and (capabilities := _query_driver("compute_cap")):
        lowest = min(map(float, capabilities))
        if lowest >= _BF16_CAPABILITY:
            return "bf16", "default: the GPU computes it"
        return "fp32", f"default: a GPU of compute capability {lowest:g} has no bf16"
    found = [name for flag, name in _BF16_FLAGS.items() if flag in _cpu_flags()]
    if found:
        return "bf16", f"default: the CPU computes it ({found[0]})"
    return "fp32", "default: this machine has no bf16 arithmetic"


def gpus() -> list[str]:
    """`name, memory, driver version` of every GPU that the driver reports; empty without a driver."""
    return _query_driver("name,memory.total,driver_version")


def gpu_memory(card: str) -> float | None:
    """Bytes of memory by a line of `gpus`; None if the driver reports none (`[N/A]`)."""
    size, _, unit = card.split(",")[1].strip().partition(" ")
    return float(size) * 2**20 if unit == "MiB" else None


def gpus_are_hidden() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides all GPUs, so that runs use the CPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in {"", "-1"}


@cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return frozenset()
    return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), []))


@cache
def _query_driver(query: str) -> list[str]:
    """One line per GPU; empty without a driver."""
    return command_output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").splitlines()
