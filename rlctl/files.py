"""Atomic replacement of files, so that readers never see partial content; cache directories; patterns."""

from __future__ import annotations

import glob
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
#: Files of a cache entry above this size in bytes are verified only by their size when the entry is used.
_HASHED = 16 << 20
_LOCK_TIMEOUT_MINUTES = 30


def cache_root() -> Path:
    """Directory for files that rlctl can recreate: `$RLCTL_CACHE`, else the user's cache directory."""
    override = os.environ.get("RLCTL_CACHE")
    return Path(override).expanduser() if override else user_cache_path("rlctl")


def cached_directory(entry: Path, build: Callable[[Path], None], *, what: str) -> Path:
    """A directory of the cache, built if it is missing or has changed since it was built.

    It is renamed into place when complete. A lock makes other processes wait for the builder; the holder of
    the lock removes leftovers of a killed builder.

    Args:
        entry: path of the directory.
        build: fills an empty directory.
        what: description of the content, for errors.

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
    """Build in a temporary sibling of `entry`, then rename it. The caller holds the lock."""
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
    """Whether every file exists and is unchanged since the entry was built."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        return all(_fingerprint(entry / name) == seen for name, seen in manifest.items())
    except (OSError, ValueError):
        return False


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    return f"{size} bytes" if size > _HASHED else sha256_of(path)


def cache_failure(what: str, place: Path, error: OSError) -> EnvironmentFailure:
    """The error for a failed write to the cache at `place`; `what` describes it."""
    return EnvironmentFailure(
        f"{what}: {error.strerror or error}",
        where=str(place),
        fix="free some space there, or set RLCTL_CACHE to a writable directory",
    )


def matches(name: str) -> list[Path]:
    """Files or directories for `name`: the path itself if it exists, else all matches of the pattern."""
    path = Path(name).expanduser()
    return [path] if path.exists() else sorted(map(Path, glob.glob(str(path))))  # noqa: PTH207 - any depth


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply_umask(directory: Path) -> None:
    """Give every file below a directory the mode of a new file; some libraries write unreadable ones."""
    probe = directory / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(mode)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; on success it is synced and renamed to `path`, else deleted.

    Raises:
        OSError: from the file system.
    """
    # `.tmp` comes last, so that a leftover of a killed process never matches *.parquet or *.json.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace the file at `path` atomically by `text` (UTF-8)."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
