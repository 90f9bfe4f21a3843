"""Checks of the machine: processors, memory, disks, compiler, loopback network, mode of W&B.

No torch here: `engines` tries what torch can do with a GPU.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import shutil
import socket
import tempfile
from functools import partial
from pathlib import Path

import psutil

from rlctl.doctor.doctor_report import Check
from rlctl.files import cache_root
from rlctl.processes import command_output
from rlctl.spec.hardware import gpus
from rlctl.spec.model_size import hub_cache

_check = partial(Check, "machine")
_GIB = 2**30
#: Free bytes below which a run cannot store its metrics, and below which it may not store its checkpoints.
DISK_NEEDED, DISK_USUAL = 1 * _GIB, 10 * _GIB
#: NCCL exchanges data between ranks through it; containers often have 64 MiB only.
SHARED_MEMORY, SHARED_MEMORY_USUAL = Path("/dev/shm"), 1 * _GIB
_YES = {"1", "true", "yes", "on"}


def machine_checks() -> list[Check]:
    """Everything but packages and engines."""
    return [_processors(), _graphics(), *_disks(), _shared_memory(), _compiler(), _network(), _wandb()]


def _graphics() -> Check:
    """The GPUs that the driver reports, whether or not torch can use them."""
    lines = gpus()
    if not lines:
        return _check("GPU", "note", "none found by nvidia-smi: everything runs on the CPU")
    return _check("GPU", "ok", "; ".join(lines))


def _processors() -> Check:
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        usable = os.cpu_count() or 1
    memory = psutil.virtual_memory()
    free = f"{memory.available / _GIB:.0f} of {memory.total / _GIB:.0f} GiB free"
    return _check("CPU", "ok", f"{usable} cores, {free}")


def _disks() -> list[Check]:
    writable = "to a directory that can be written"
    return [
        _disk("runs", Path("runs"), "start rlctl elsewhere, or set trainer.run_dir"),
        _disk("rlctl's cache", cache_root(), f"set RLCTL_CACHE {writable}"),
        _disk("models' cache", hub_cache(), f"set HF_HOME {writable}"),
        _disk("temporary files", Path(tempfile.gettempdir()), f"set TMPDIR {writable}"),
    ]


def _disk(name: str, path: Path, fix: str) -> Check:
    where = f"disk for {name}"
    path = path.expanduser().absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return _check(where, "broken", f"{there} cannot be written", fix)
    free = shutil.disk_usage(there).free
    found = f"{free / _GIB:.1f} GiB free at {path}"
    if free < DISK_NEEDED:
        return _check(where, "broken", found, f"free some space there, or {fix}")
    if free < DISK_USUAL:
        return _check(where, "note", found, "a 7B model is 15 GB, its checkpoint with optimizer 110 GB")
    return _check(where, "ok", found)


def _shared_memory() -> Check:
    if not SHARED_MEMORY.is_dir():
        return _check("shared memory", "note", f"no {SHARED_MEMORY} on this system")
    size = shutil.disk_usage(SHARED_MEMORY)
    found = f"{size.free / _GIB:.1f} of {size.total / _GIB:.1f} GiB free at {SHARED_MEMORY}"
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
    has_ninja = shutil.which("ninja") is not None or importlib.util.find_spec("ninja") is not None
    missing = [
        name for name, is_there in {command: bool(compiler), "ninja": has_ninja}.items() if not is_there
    ]
    if not missing:
        return _check("C++ compiler", "ok", f"{compiler}; ninja")
    found = f"{' and '.join(missing)} not found"
    fix = "install it: DeepSpeed's CPU operators and, on a GPU, vLLM's kernels are compiled at first use"
    return _check("C++ compiler", "note", found, fix)


def _network() -> Check:
    """Ranks connect to each other by TCP, on one machine at 127.0.0.1."""
    why = ""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            server.settimeout(5)
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                connection, _ = server.accept()
                with connection:
                    client.sendall(b"?")
                    if connection.recv(1) == b"?":
                        return _check("network", "ok", f"127.0.0.1:{port} was bound and connected to")
    except OSError as error:
        why = f": {error.strerror or error}"
    fix = "allow TCP on the loopback interface (`ip link set lo up`); ranks connect through it"
    return _check("network", "broken", f"no TCP connection at 127.0.0.1{why}", fix)


def _wandb() -> Check:
    """How a run with `trainer.logger: wandb` would log."""
    mode = os.environ.get("WANDB_MODE", "online")
    if os.environ.get("WANDB_DISABLED", "").lower() in _YES or mode == "disabled":
        return _check("W&B", "note", "disabled: trainer.logger=wandb logs nothing", "unset WANDB_MODE")
    if mode in {"offline", "dryrun"}:
        return _check("W&B", "ok", "offline: files are kept in the run, upload with `wandb sync`")
    if os.environ.get("WANDB_API_KEY") or _is_logged_in():
        return _check("W&B", "ok", "online, logged in")
    fix = "for trainer.logger=wandb: `wandb login`, or WANDB_MODE=offline"
    return _check("W&B", "note", "online, not logged in", fix)


def _is_logged_in() -> bool:
    """Whether `wandb login` has written an entry; the key itself is not read."""
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
