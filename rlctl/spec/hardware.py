"""GPUs and bf16 support of this machine, detected without torch; the default precision of a run."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Literal

from rlctl.processes import command_output

#: NVIDIA GPUs support bf16 from this compute capability on (Ampere).
_BF16_CAPABILITY = 8.0
#: Flags of CPUs with bf16 arithmetic; without one of them torch emulates it, many times slower than fp32.
_BF16_FLAGS = {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512-BF16"}
_CPU_INFO = Path("/proc/cpuinfo")


def native_dtype() -> tuple[Literal["fp32", "bf16"], str]:
    """Returns bf16 if the hardware of this machine supports it, else fp32; and the reason."""
    if not gpus_are_hidden() and (capabilities := _driver_says("compute_cap")):
        lowest = min(map(float, capabilities))
        if lowest >= _BF16_CAPABILITY:
            return "bf16", "default: the GPU computes it"
        return "fp32", f"default: a GPU of compute capability {lowest:g} has no bf16"
    if found := [name for flag, name in _BF16_FLAGS.items() if flag in _cpu_flags()]:
        return "bf16", f"default: the CPU computes it ({found[0]})"
    return "fp32", "default: this machine has no bf16 arithmetic"


def gpus() -> list[str]:
    """`name, memory, driver version` of every GPU that the driver reports; empty without a driver."""
    return _driver_says("name,memory.total,driver_version")


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
def _driver_says(query: str) -> list[str]:
    """One line per GPU; empty without a driver."""
    return command_output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").splitlines()
