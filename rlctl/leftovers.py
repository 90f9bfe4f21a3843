"""What killed processes leave in /tmp and /dev/shm, removed by the next start.

A directory made here names its host and process, and is locked while that process lives, so that one of
another container, which counts its processes on its own, is left alone too. Shared memory that libraries make
(`psm_…` of Python's multiprocessing, which engines use) names nobody: a process notes which segments it and
its children hold in such a directory. Only those are removed, and only where no process holds them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_SEGMENTS = "shared-memory"


def own_directory(kind: str, parent: Path | None = None) -> tuple[Path, int]:
    """A new directory `rlctl-<kind>-<host>-<pid>-…` and the descriptor that holds its lock.

    Args:
        kind: letters only.
        parent: where; None: the directory for temporary files.

    Raises:
        OSError: it cannot be made.
    """
    prefix = f"rlctl-{kind}-{socket.gethostname()}-{os.getpid()}-"
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    handle = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # not every file system locks directories
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return path, handle


@contextmanager
def temporary_directory(kind: str) -> Iterator[Path]:
    """`own_directory`, removed at the end; if the process is killed, by the next start."""
    path, handle = own_directory(kind)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def clear(parent: Path | None = None) -> None:
    """Remove what processes of this host and user left that were killed.

    Args:
        parent: where; None: the directory for temporary files, and shared memory.
    """
    import psutil

    for place in [parent] if parent else {Path(tempfile.gettempdir()), SHARED_MEMORY}:
        for path in place.glob(f"rlctl-*-{socket.gethostname()}-*"):
            pid = path.name.rsplit("-", 2)[-2]
            if not pid.isdigit() or psutil.pid_exists(int(pid)) or not path.is_dir() or _is_locked(path):
                continue
            with contextlib.suppress(OSError):
                _free((path / _SEGMENTS).read_text().split())
            shutil.rmtree(path, ignore_errors=True)


def note_segments(directory: Path) -> None:
    """Write down in `directory` which shared memory this process and its children hold."""
    import psutil

    process = psutil.Process()
    held = set().union(*map(_held, [process.pid, *(child.pid for child in process.children(recursive=True))]))
    file = directory / _SEGMENTS
    with contextlib.suppress(OSError):
        known = set(file.read_text().split()) if file.exists() else set()
        if held - known:
            file.write_text("\n".join(sorted(held | known)))


def _free(names: list[str]) -> None:
    """Remove these segments where no process that can be looked at holds them."""
    segments = (SHARED_MEMORY / Path(name).name for name in names)
    ours = [path for path in segments if path.is_file() and path.stat().st_uid == os.getuid()]
    if ours:
        import psutil

        held = set().union(*map(_held, psutil.pids()))
        for path in ours:
            if path.name not in held:
                path.unlink(missing_ok=True)


def _held(pid: int) -> set[str]:
    """Names of the shared memory that a process has mapped or open."""
    place, names = Path(f"/proc/{pid}"), []
    with contextlib.suppress(OSError):
        names += [line.split(maxsplit=5)[-1] for line in (place / "maps").read_text().splitlines()]
        names += [str(link.readlink()) for link in (place / "fd").iterdir()]
    return {Path(name).name for name in names if name.startswith(f"{SHARED_MEMORY}/")}


def _is_locked(path: Path) -> bool:
    """Whether a process holds it, be it one of another container."""
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
