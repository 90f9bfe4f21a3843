"""Directories that engines read: one per version, published atomically."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from rlctl import leftovers
from rlctl.errors import RunFailure, UsageError
from rlctl.files import apply_umask
from rlctl.leftovers import SHARED_MEMORY


class VersionedDir:
    """Writes each version to a directory and keeps the last two.

    A directory appears under its name only when it is complete, so a restarted engine can load the newest one
    at any time.

    Args:
        parent: directory to write to; None: shared memory of this machine.

    Raises:
        UsageError: `parent` cannot be written to.
    """

    def __init__(self, parent: Path | None) -> None:
        is_shared = parent is not None
        parent = parent or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        try:
            parent.mkdir(parents=True, exist_ok=True)
            leftovers.clear(parent)  # those in shared memory would stay until a reboot
            self._root, handle = leftovers.own_directory("weights", parent)
            self._held = contextlib.ExitStack()
            self._held.callback(os.close, handle)
            if is_shared:
                self._root.chmod(0o755)
        except OSError as error:
            raise UsageError(
                f"cannot write weights there: {error.strerror}", where="rollout.server.weights_dir"
            ) from error
        self._newest: Path | None = None
        self._before: Path | None = None

    def publish(self, name: str, fill: Callable[[Path], None]) -> Path:
        """Writes a version; the last two are kept.

        Args:
            name: name of its directory; an existing one is replaced.
            fill: writes the files into the given directory.

        Raises:
            RunFailure: there is not enough space.
        """
        target, part = self._root / name, self._root / "part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            fill(part)
            apply_umask(part)  # engines on other nodes may run as another user
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
        except (OSError, SafetensorError) as error:  # a full disk can raise either one
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
        """Directory of the last complete version; there must be one."""
        assert self._newest is not None
        return self._newest

    def close(self) -> None:
        """Removes everything written."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._held.close()
