"""Removal of files that killed processes left in /tmp and /dev/shm, at the next start.

A directory created here has host and process id in its name, and is locked while the process lives. The lock
protects directories of other containers, where process ids have a different meaning. Names of shared memory
segments that libraries create (`psm_…` of Python's multiprocessing, which engines use) do not identify a
process, so a process records the segments that it and its children hold in such a directory. Only recorded
segments are removed, and only if no process holds them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_SEGMENTS = "shared-memory"


def own_directory(kind: str, parent: Path | None = None) -> tuple[Path, int]:
    """Creates a directory `rlctl-<kind>-<host>-<pid>-…`; returns it and the descriptor that holds its lock.

    `kind` consists of letters. The default parent is the directory for temporary files.

    Raises:
        OSError: it cannot be created.
    """
    prefix = f"rlctl-{kind}-{socket.gethostname()}-{os.getpid()}-"
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    handle = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # not every file system locks directories
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return path, handle


@contextmanager
def temporary_directory(kind: str) -> Iterator[Path]:
    """Yields an `own_directory`, which is removed at the end; if the process is killed, by the next start."""
    path, handle = own_directory(kind)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def clear(parent: Path | None = None) -> None:
    """Remove directories and shared memory of killed processes of this host and user.

    Searches `parent`; default: the directory for temporary files, and shared memory.
    """
    import psutil

    for place in [parent] if parent else {Path(tempfile.gettempdir()), SHARED_MEMORY}:
        for path in place.glob(f"rlctl-*-{socket.gethostname()}-*"):
            pid = path.name.rsplit("-", 2)[-2]
            if not pid.isdecimal() or psutil.pid_exists(int(pid)) or not _is_ours(path) or _is_locked(path):
                continue
            with contextlib.suppress(OSError):
                _free((path / _SEGMENTS).read_text().split())
            shutil.rmtree(path, ignore_errors=True)


def note_segments(directory: Path) -> None:
    """Record in `directory` the shared memory segments that this process and its children hold."""
    import psutil

    process = psutil.Process()
    held = set().union(*map(_held, [process.pid, *(child.pid for child in process.children(recursive=True))]))
    file = directory / _SEGMENTS
    with contextlib.suppress(OSError):
        known = set(file.read_text().split()) if file.exists() else set()
        if held - known:
            file.write_text("\n".join(sorted(held | known)))


def _free(names: list[str]) -> None:
    """Remove those of the segments that belong to this user and that no inspectable process holds."""
    segments = (SHARED_MEMORY / Path(name).name for name in names)
    ours = [path for path in segments if path.is_file() and path.stat().st_uid == os.getuid()]
    if ours:
        import psutil

        held = set().union(*map(_held, psutil.pids()))
        for path in ours:
            if path.name not in held:
                path.unlink(missing_ok=True)


def _held(pid: int) -> set[str]:
    """Names of the shared memory segments that a process has mapped or opened."""
    place, names = Path(f"/proc/{pid}"), []
    with contextlib.suppress(OSError):
        names += [line.split(maxsplit=5)[-1] for line in (place / "maps").read_text().splitlines()]
        names += [str(link.readlink()) for link in (place / "fd").iterdir()]
    return {Path(name).name for name in names if name.startswith(f"{SHARED_MEMORY}/")}


def _is_ours(path: Path) -> bool:
    """Whether it is a directory of this user; anyone can create one with such a name."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _is_locked(path: Path) -> bool:
    """Whether a process, possibly of another container, holds the directory's lock."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(handle)
    return False
