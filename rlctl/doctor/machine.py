"""The machine a run finds: processors, memory, disks, compiler, loopback network, W&B's mode.

Nothing heavy is imported here; what torch can do with a GPU is tried in `engines`.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil

from rlctl.doctor.report import Check
from rlctl.files import cache_root
from rlctl.spec.model_size import hub_cache

_GROUP = "machine"
_GIB = 2**30
#: Below the first a run cannot even keep its metrics, below the second no checkpoint of a small model.
DISK_NEEDED, DISK_USUAL = 1 * _GIB, 10 * _GIB
#: NCCL's ranks exchange through it; containers are often given 64 MiB.
SHARED_MEMORY, SHARED_MEMORY_USUAL = Path("/dev/shm"), 1 * _GIB
_COMMAND_S = 10
_SAYS_YES = {"1", "true", "yes", "on"}


def machine_checks() -> list[Check]:
    """Everything but packages and engines."""
    return [_processors(), graphics(), *_disks(), _shared_memory(), _compiler(), _network(), _wandb()]


def graphics() -> Check:
    """The GPUs the driver knows, whether or not torch can use them."""
    lines = gpus()
    if not lines:
        return Check(_GROUP, "GPU", "note", "none found by nvidia-smi: everything runs on the CPU")
    return Check(_GROUP, "GPU", "ok", "; ".join(lines))


def gpus() -> list[str]:
    """`name, memory, driver version` of every GPU; empty without a driver."""
    query = "--query-gpu=name,memory.total,driver_version"
    return _output("nvidia-smi", query, "--format=csv,noheader").splitlines()


def _processors() -> Check:
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        usable = os.cpu_count() or 1
    memory = psutil.virtual_memory()
    free = f"{memory.available / _GIB:.0f} of {memory.total / _GIB:.0f} GiB free"
    return Check(_GROUP, "CPU", "ok", f"{usable} cores, {free}")


def _disks() -> list[Check]:
    places = {
        "runs": (Path("runs"), "start rlctl elsewhere, or set trainer.run_dir"),
        "rlctl's cache": (cache_root(), "set RLCTL_CACHE to a directory that can be written"),
        "models' cache": (hub_cache(), "set HF_HOME to a directory that can be written"),
        "temporary files": (Path(tempfile.gettempdir()), "set TMPDIR to a directory that can be written"),
    }
    return [_disk(name, path, fix) for name, (path, fix) in places.items()]


def _disk(name: str, path: Path, fix: str) -> Check:
    where = f"disk for {name}"
    path = path.expanduser().absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(_GROUP, where, "broken", f"{there} cannot be written", fix)
    free = shutil.disk_usage(there).free
    found = f"{free / _GIB:.1f} GiB free at {path}"
    if free < DISK_NEEDED:
        return Check(_GROUP, where, "broken", found, f"free some space there, or {fix}")
    if free < DISK_USUAL:
        return Check(
            _GROUP, where, "note", found, "a 7B model is 15 GB, its checkpoint with optimizer 110 GB"
        )
    return Check(_GROUP, where, "ok", found)


def _shared_memory() -> Check:
    if not SHARED_MEMORY.is_dir():
        return Check(_GROUP, "shared memory", "note", f"no {SHARED_MEMORY} on this system")
    size = shutil.disk_usage(SHARED_MEMORY)
    found = f"{size.free / _GIB:.1f} of {size.total / _GIB:.1f} GiB free at {SHARED_MEMORY}"
    if size.free < SHARED_MEMORY_USUAL:
        fix = (
            "several GPUs talk through it, and rollout servers get their weights there (twice a model's "
            "size): docker run --shm-size=16g, or set rollout.server.weights_dir"
        )
        return Check(_GROUP, "shared memory", "note", found, fix)
    return Check(_GROUP, "shared memory", "ok", found)


def _compiler() -> Check:
    command = os.environ.get("CXX") or "c++"
    compiler = _output(*command.split(), "--version").partition("\n")[0]
    has_ninja = shutil.which("ninja") is not None or importlib.util.find_spec("ninja") is not None
    missing = [
        name for name, is_there in {command: bool(compiler), "ninja": has_ninja}.items() if not is_there
    ]
    if not missing:
        return Check(_GROUP, "C++ compiler", "ok", f"{compiler}; ninja")
    found = f"{' and '.join(missing)} not found"
    fix = "install it: DeepSpeed's CPU operators and, on a GPU, vLLM's kernels are compiled at first use"
    return Check(_GROUP, "C++ compiler", "note", found, fix)


def _network() -> Check:
    """Ranks find one another by TCP, on one machine at 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                server.settimeout(5)
                connection, _ = server.accept()
                with connection:
                    client.sendall(b"?")
                    is_heard = connection.recv(1) == b"?"
    except OSError as error:
        is_heard, why = False, f": {error.strerror or error}"
    else:
        why = ""
    if is_heard:
        return Check(_GROUP, "network", "ok", f"127.0.0.1:{port} was bound and connected to")
    fix = "allow TCP on the loopback interface (`ip link set lo up`); ranks meet there"
    return Check(_GROUP, "network", "broken", f"no TCP connection at 127.0.0.1{why}", fix)


def _wandb() -> Check:
    """How a run with `trainer.logger: wandb` would log."""
    mode = os.environ.get("WANDB_MODE", "online")
    if os.environ.get("WANDB_DISABLED", "").lower() in _SAYS_YES or mode == "disabled":
        return Check(_GROUP, "W&B", "note", "disabled: trainer.logger=wandb logs nothing", "unset WANDB_MODE")
    if mode in {"offline", "dryrun"}:
        return Check(_GROUP, "W&B", "ok", "offline: files are kept in the run, upload with `wandb sync`")
    if os.environ.get("WANDB_API_KEY") or _is_logged_in():
        return Check(_GROUP, "W&B", "ok", "online, logged in")
    fix = "for trainer.logger=wandb: `wandb login`, or WANDB_MODE=offline"
    return Check(_GROUP, "W&B", "note", "online, not logged in", fix)


def _is_logged_in() -> bool:
    """Whether `wandb login` has left an entry where it leaves them; the key itself is not looked at."""
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _output(*command: str) -> str:
    """A command's standard output, empty if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
