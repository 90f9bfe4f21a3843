"""A server in a separate process on this machine. Imports no torch, because Ray actors do not need it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from rlctl.errors import UsageError
from rlctl.processes import PARENT, free_port

#: Seconds to wait after each signal for a server to end.
_STOP_S = 20
#: Variables not passed on, like those that begin with TORCHELASTIC_: with those of the trainer's process
#: group, an engine would wait for a store that the launcher does not provide for it.
_NOT_INHERITED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)


class LocalServer:
    """A server on this machine, in a separate process group.

    Args:
        arguments: arguments of Python.
        environment: variables added to those of this process, from which variables of ranks are removed.
        log: file to which the server's output is appended.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _NOT_INHERITED and not name.startswith("TORCHELASTIC_")
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                env=inherited | environment | {PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the trainer, which then stops them
            )

    def poll(self) -> int | None:
        """See `ServerProcess.poll`."""
        return self._process.poll()

    def end(self) -> None:
        """Ends the server and everything it started: first with SIGTERM, then with SIGKILL."""
        process = self._process
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            if not _group_lives(process.pid):
                return


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def server_port(host: str) -> int:
    """A free port for a server at this address of this machine.

    Raises:
        UsageError: `host` is not an address of this machine.
    """
    try:
        return free_port(host)
    except OSError as error:
        raise UsageError(
            f"vLLM servers cannot listen at {host}, no address of this machine: {error.strerror}",
            where="MASTER_ADDR",
            fix="give an address of the first node that other nodes can reach; or set rollout.server.urls",
        ) from error
