"""A server in a process of its own on this machine. No torch: an actor of Ray needs nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from rlctl.errors import UsageError
from rlctl.processes import PARENT

#: Seconds that a server has to end by itself.
_STOP_S = 20
#: Of the trainer's own process group; an engine has one of its own.
_OF_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
)


class LocalServer:
    """A server on this machine, in a process group of its own.

    Args:
        arguments: of Python.
        environment: beside this process's, from which what describes a rank is left out.
        log: its output is added to it.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not _is_of_ranks(name)}
        inherited.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                env=inherited | environment | {PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the trainer, which ends them when it is done
            )

    def poll(self) -> int | None:
        """See `ServerProcess.poll`."""
        return self._process.poll()

    def end(self) -> None:
        """Ask it and everything it started to end, then make them."""
        process = self._process
        for sign, patience in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
            if not _group_lives(process.pid):
                return


def _is_of_ranks(name: str) -> bool:
    """With torchrun's own, an engine would wait for a store that the launcher does not keep for it."""
    return name in _OF_RANKS or name.startswith("TORCHELASTIC_")


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def free_port(host: str) -> int:
    """A port on which nothing listens at this address of this machine.

    Raises:
        UsageError: it is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            port: int = probe.getsockname()[1]
            return port
    except OSError as error:
        raise UsageError(
            f"vLLM servers cannot listen at {host}, no address of this machine: {error.strerror}",
            where="MASTER_ADDR",
            fix="give the first node's own address, which the others reach; or set rollout.server.urls",
        ) from error
