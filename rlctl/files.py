"""Files that survive a crash: readers see the old one or the whole new one, never half of it. The cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from rlctl.errors import EnvironmentFailure, RunFailure

_MANIFEST = "manifest.json"
#: Files of a cache entry above this size are compared by their size alone each time the entry is used.
_HASHED = 16 << 20
_LOCK_TIMEOUT_MINUTES = 30


def cache_root() -> Path:
    """Where rlctl keeps what it can make again: `$RLCTL_CACHE`, else the user's cache directory."""
    override = os.environ.get("RLCTL_CACHE")
    return Path(override).expanduser() if override else user_cache_path("rlctl")


def cached_directory(entry: Path, build: Callable[[Path], None], *, what: str) -> Path:
    """A directory of the cache, built once.

    It appears by one rename, complete, or not at all. A lock makes a second process wait for the first; its
    holder removes what a killed builder left. A directory that has changed since it was built is built again.

    Args:
        entry: its path.
        build: fills an empty directory.
        what: it holds, for errors.

    Raises:
        EnvironmentFailure: the cache cannot be written.
        RunFailure: another process holds the lock for half an hour.
    """
    if _is_complete(entry):
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock", timeout=60.0 * _LOCK_TIMEOUT_MINUTES):
            if not _is_complete(entry):
                _build(entry, build)
    except Timeout as error:
        what = f"another process has been building {what} for {_LOCK_TIMEOUT_MINUTES} minutes"
        raise RunFailure(what, where=f"{entry}.lock") from error
    except OSError as error:
        raise cache_failure(f"{what} cannot be cached", entry.parent, error) from error
    return entry


def _build(entry: Path, build: Callable[[Path], None]) -> None:
    """Build in a directory beside `entry`, then rename. The caller holds the lock."""
    for leftover in (entry, *entry.parent.glob(f"{entry.name}.building-*")):
        shutil.rmtree(leftover, ignore_errors=True)
    building = entry.with_name(f"{entry.name}.building-{os.getpid()}")
    building.mkdir()
    try:
        build(building)
        files = [path for path in sorted(building.rglob("*")) if path.is_file()]
        manifest = {path.relative_to(building).as_posix(): _fingerprint(path) for path in files}
        (building / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        building.rename(entry)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _is_complete(entry: Path) -> bool:
    """Whether every file is there and unchanged since it was written."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        return all(_fingerprint(entry / name) == seen for name, seen in manifest.items())
    except (OSError, ValueError):
        return False


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    return f"{size} bytes" if size > _HASHED else sha256_of(path)


def cache_failure(what: str, place: Path, error: OSError) -> EnvironmentFailure:
    """`what` that could not be written to the cache at `place`."""
    return EnvironmentFailure(
        f"{what}: {error.strerror or error}",
        where=str(place),
        fix="free some space there, or set RLCTL_CACHE to a directory that can be written",
    )


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def readable_as_umask_says(directory: Path) -> None:
    """Give every file below it the mode of a new one: some libraries write files that others cannot read."""
    probe = directory / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(mode)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is synced and takes the name, on failure it goes.

    Raises:
        OSError: as the file system gives it.
    """
    # The suffix goes last, so that a leftover of a killed process never matches *.parquet or *.json.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8) in one go."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
