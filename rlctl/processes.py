"""Output of commands, ports, addresses and interfaces, progress of waits, times and ends of processes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

LOOPBACK = "127.0.0.1"
#: Signals that end a command.
STOPS = (signal.SIGINT, signal.SIGTERM)
#: Environment variable with this node's address in the network of a run on several nodes; vLLM reads it too.
NODE_ADDRESS = "VLLM_HOST_IP"
_PR_SET_PDEATHSIG = 1
#: Environment variable with a parent's process id, for child processes that call `end_with_parent`.
PARENT = "RLCTL_PARENT"
#: Environment variables of a rank, besides those that begin with TORCHELASTIC_.
_OF_RANKS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_LOWEST_PORT = 10_000
_PORTS_TRIED = 100
_progress = [0]


def note_progress() -> None:
    """Record progress of work that this process only waits for, so that the watchdog does not report a
    hang."""
    _progress[0] += 1


def progress() -> int:
    """Number of calls of `note_progress`."""
    return _progress[0]


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
    found = LOOPBACK
    for host in hosts:
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(host, 80)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as route:  # connecting only selects a route
                route.connect(address)
                found = str(route.getsockname()[0])
            if not is_loopback(found):
                break
    return found


def is_loopback(address: str) -> bool:
    """Whether an IP address can be reached from this machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def use_interface(address: str = LOOPBACK) -> None:
    """Makes gloo and NCCL use the interface with this address, unless the environment names another one."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if address.partition("%")[0] in {each.address.partition("%")[0] for each in addresses}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without `=` a prefix of names


def environment_without_ranks() -> dict[str, str]:
    """The environment for a child that is no rank: with the variables of a rank it would wait for others."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith("TORCHELASTIC_")
    }


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
