"""Directories that engines read, one per version, each whole or not there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
from safetensors import SafetensorError

from rlctl.errors import RunFailure, UsageError

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "rlctl-weights-"


class VersionedDir:
    """Where each version of something is written, the last two kept.

    A directory appears under its name only when it is complete, so an engine that starts again may
    load the newest at any time.

    Args:
        parent: where to write; None: shared memory of this machine.

    Raises:
        UsageError: `parent` cannot be written to.
    """

    def __init__(self, parent: Path | None) -> None:
        is_shared = parent is not None
        parent = parent or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(parent)
            self._root = Path(
                tempfile.mkdtemp(prefix=f"{_PREFIX}{socket.gethostname()}-{os.getpid()}-", dir=parent)
            )
            self._held = contextlib.ExitStack()
            handle = os.open(self._root, os.O_RDONLY)
            self._held.callback(os.close, handle)
            with contextlib.suppress(OSError):  # not every file system locks directories
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if is_shared:
                self._root.chmod(0o755)  # engines on other nodes may run as another user
        except OSError as error:
            raise UsageError(
                f"cannot write weights there: {error.strerror}", where="rollout.server.weights_dir"
            ) from error
        self._newest: Path | None = None
        self._before: Path | None = None

    def publish(self, name: str, fill: Callable[[Path], None]) -> Path:
        """Write a version; the one before the last is removed.

        Args:
            name: of its directory; one that is there already is replaced.
            fill: writes the files into the directory it is given.

        Raises:
            RunFailure: there is no room.
        """
        target, part = self._root / name, self._root / "part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            fill(part)
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
        except (OSError, SafetensorError) as error:  # a full disk is either, by who notices
            reason = getattr(error, "strerror", None) or error
            raise RunFailure(
                f"weights for the rollout engines cannot be written: {reason}",
                where=str(self._root),
                fix="free space there, or set rollout.server.weights_dir",
            ) from error
        if self._before and self._before != target:
            shutil.rmtree(self._before, ignore_errors=True)
        if self._newest != target:
            self._before, self._newest = self._newest, target
        return target

    def latest(self) -> Path:
        """The last complete version.

        Raises:
            ValueError: nothing was written yet.
        """
        if self._newest is None:
            raise ValueError("no weights have been handed over")
        return self._newest

    def close(self) -> None:
        """Remove everything written."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._held.close()


def _remove_abandoned(parent: Path) -> None:
    """What runs of this machine left that were killed: in shared memory it would stay until a reboot."""
    for path in parent.glob(f"{_PREFIX}{socket.gethostname()}-*"):
        pid = path.name.rsplit("-", 2)[-2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and not _is_locked(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    """Whether a run holds it, be it one of another container that counts its processes on its own."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
