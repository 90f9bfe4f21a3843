"""Files that survive a crash: readers see the old one or the whole new one, never half of it. The cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path


def cache_root() -> Path:
    """Where rlctl keeps what it can make again: `$RLCTL_CACHE`, else the user's cache directory."""
    override = os.environ.get("RLCTL_CACHE")
    return Path(override).expanduser() if override else user_cache_path("rlctl")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
