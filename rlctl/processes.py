"""Output of commands, ports, addresses and interfaces, progress of waits, times and ends of processes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import ipaddress
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType

LOOPBACK = "127.0.0.1"
#: Signals that end a command.
STOPS = (signal.SIGINT, signal.SIGTERM)
#: Environment variable with this node's address in the network of a run on several nodes; vLLM reads it too.
NODE_ADDRESS = "VLLM_HOST_IP"
_PR_SET_PDEATHSIG = 1
#: Environment variable with the key of vLLM servers, of the trainer and its servers; set by the run unless
#: the user has.
SERVER_KEY = "RLCTL_SERVER_KEY"
#: Environment variable with the key that signs this user's runs, where processes have no common state
#: directory.
TRUST_KEY = "RLCTL_TRUST_KEY"
#: Environment variables with keys of services that a server of the run does not need.
OTHER_KEYS = (
    TRUST_KEY,
    "OPENAI_API_KEY",
    "ANTHROPIC_API_KEY",
    "JUDGE_API_KEY",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_PASSWORD",
)
#: Environment variable with a parent's process id, for child processes that call `end_with_parent`.
PARENT = "RLCTL_PARENT"
#: Environment variables of a rank, besides those that begin with TORCHELASTIC_.
_OF_RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
#: Environment variable without which Python imports from the working directory; its value, if rlctl set it.
_SAFE_PATH, _BY_US = "PYTHONSAFEPATH", "rlctl"
_LOWEST_PORT = 10_000
_PORTS_TRIED = 100
_progress = [0, 0]  # in other threads, in the main thread


def note_progress() -> None:
    """Record progress of work that this process only waits for, so that the watchdog does not report a
    hang."""
    _progress[threading.current_thread() is threading.main_thread()] += 1


def progress(*, of_main: bool = False) -> int:
    """Number of calls of `note_progress`; with `of_main` only of those in the main thread."""
    return _progress[True] if of_main else sum(_progress)


def command_output(*command: str, timeout_s: float = 10.0) -> str:
    """A command's standard output, stripped; empty if the command is missing, fails or times out."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def free_port(host: str = LOOPBACK) -> int:
    """A free port at this address, from below the ports that Linux assigns to outgoing connections.

    So it stays free until a server listens there, and while a server that ended starts again.

    Raises:
        OSError: `host` is not an address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    ports = range(_LOWEST_PORT, max(_first_outgoing_port(), _LOWEST_PORT + _PORTS_TRIED))
    for port in [*random.SystemRandom().sample(ports, _PORTS_TRIED), 0]:  # 0: any free port
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], port, *address[2:]))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not port:
                    raise
            else:
                return int(probe.getsockname()[1])
    raise AssertionError("binding to port 0 succeeds or raises")


def _first_outgoing_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32_768


def own_address(hosts: Iterable[str | None]) -> str:
    """This machine's address as seen by these hosts; loopback only if all of them are this machine."""
    own = LOOPBACK
    for host in hosts:
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(host, 80)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as route:  # connecting only selects a route
                route.connect(address)
                own = str(route.getsockname()[0])
            if not is_loopback(own):
                break
    return own


def is_loopback(address: str) -> bool:
    """Whether an IP address can be reached from this machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_this_machine(host: str) -> bool:
    """Whether the host of an address is this machine, by an address that only it reaches or as localhost."""
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"


def children_of(pid: int, max_threads: int | None = None) -> list[int]:
    """The children of a process's threads, of `max_threads` at most, as far as the kernel lists them."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in islice(os.scandir(f"/proc/{pid}/task"), max_threads):
            with contextlib.suppress(OSError):  # it has ended
                children += map(int, Path(thread.path, "children").read_bytes().split())
    return children


def with_descendants(
    roots: Iterable[int], *, max_threads: int | None = None, max_processes: int | None = None
) -> list[int]:
    """These processes, first, and their descendants, as far as the kernel lists them.

    Args:
        max_threads: threads of a process whose children are looked for; None: all.
        max_processes: None: no limit.
    """
    known = list(roots)
    for pid in known:  # which grows
        known += children_of(pid, max_threads)
        if max_processes is not None and len(known) >= max_processes:
            break
    return known[:max_processes]


def use_interface(address: str = LOOPBACK) -> None:
    """Makes gloo and NCCL use the interface with this address, unless the environment names another one."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if address.partition("%")[0] in {each.address.partition("%")[0] for each in addresses}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without `=` a prefix of names


def import_path() -> str:
    """`PYTHONPATH` with which a child imports the same rlctl.

    Start it with `python -P`: files of the working directory, maybe someone else's, are then no modules.
    """
    root = str(Path(__file__).parents[1])
    return os.pathsep.join([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def environment_without_keys() -> dict[str, str]:
    """The environment for a child that neither signs runs nor talks to servers; it imports the same rlctl."""
    kept = {name: value for name, value in os.environ.items() if name not in {SERVER_KEY, TRUST_KEY}}
    return kept | {"PYTHONPATH": import_path()}


@contextlib.contextmanager
def safe_import_path() -> Iterator[None]:
    """Context in which Python's multiprocessing starts processes as `python -P` does; see `import_path`.

    They call `restore_import_path`, so that what they start is not affected.
    """
    is_set = _SAFE_PATH in os.environ
    os.environ.setdefault(_SAFE_PATH, _BY_US)
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(_SAFE_PATH, None)


def restore_import_path() -> None:
    """In a process that was started within `safe_import_path`."""
    if os.environ.get(_SAFE_PATH) == _BY_US:
        del os.environ[_SAFE_PATH]


def environment_without_ranks() -> dict[str, str]:
    """The environment for a child that is no rank: with the variables of a rank it would wait for others."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith("TORCHELASTIC_")
    }


@contextlib.contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """Context in which this process can allocate about `num_bytes` more; then allocations fail. Linux only.

    Raises:
        MemoryError: by what allocates more.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        in_use = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    except (OSError, StopIteration):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = in_use + num_bytes
    is_lower = soft == resource.RLIM_INFINITY or limit < soft
    resource.setrlimit(resource.RLIMIT_DATA, (limit if is_lower else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its threads; 0.0 for no process, or one that has ended."""
    try:  # the clock's number is that of clock_getcpuclockid(3)
        return time.clock_gettime(~pid << 3 | 2) if pid else 0.0
    except OSError:
        return 0.0


@contextlib.contextmanager
def handling_stops(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context in which SIGINT and SIGTERM call `handler`; no signal does outside the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in STOPS if is_main}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Let the kernel signal this process when its parent ends, even by SIGKILL. Does nothing outside Linux.

    `parent` is the process id that the parent reported. If `os.getppid()` differs, the parent has already
    ended, and the signal is sent at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Context that creates many objects and no garbage: collections would take a fifth of the time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
