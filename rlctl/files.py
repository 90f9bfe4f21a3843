"""Files and directories that appear complete or not at all; cache directories; patterns."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from rlctl.errors import EnvironmentFailure, RunFailure, UsageError
from rlctl.run_files import remove

_MANIFEST = "manifest.json"
#: Files of a cache entry above this size in bytes are verified only by their size when the entry is used.
_HASHED = 16 << 20
_LOCK_TIMEOUT_MINUTES = 30
#: Bytes of the largest text that is read as a whole, such as a record of a run, and of the longest line.
MAX_TEXT = 64 << 20


def is_utf8(text: str) -> bool:
    """Whether text can be written to files: names of files may have other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str) -> str:
    """The text with `?` for lone surrogates, which a tokenizer can produce and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def cache_root() -> Path:
    """Directory for files that rlctl can recreate: `$RLCTL_CACHE`, else the user's cache directory."""
    override = os.environ.get("RLCTL_CACHE")
    return Path(override).expanduser() if override else user_cache_path("rlctl")


def keep_compiled_code() -> None:
    """Lets torch keep what it compiles in this user's cache.

    Its default is a name in /tmp that another user can take first, and it executes what it finds there.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "torchinductor"))


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


def open_to_append(path: Path, mode: Literal["a", "ab"] = "ab", **options: Any) -> IO[Any]:
    """Opens a file to append to it, but no link, which may lead outside a directory that others can write."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666), **options)


def open_regular(path: Path) -> IO[bytes]:
    """Opens a file of a directory that someone else may have written: no pipe, and no device without an end.

    Raises:
        OSError: it is something else than a file, or from the file system.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no file", str(path))


def read_text(path: Path) -> str:
    """The text (UTF-8) of a file that someone else may have written; holes let a small file be long.

    Raises:
        OSError: it is no file, or has more than `MAX_TEXT` bytes, or from the file system.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path) as stream:
        content = stream.read(MAX_TEXT + 1)
    if len(content) > MAX_TEXT:
        raise OSError(errno.EFBIG, f"it has more than {MAX_TEXT >> 20} MiB", str(path))
    return content.decode()


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file that someone else may have written, with their ends.

    Raises:
        OSError: it is no file, or has a line of more than `MAX_TEXT` bytes, or from the file system.
    """
    with open_regular(path) as stream:
        while line := stream.readline(MAX_TEXT + 1):
            if len(line) > MAX_TEXT:
                raise OSError(errno.EFBIG, f"it has a line of more than {MAX_TEXT >> 20} MiB", str(path))
            yield line


def is_file(path: str | Path) -> bool:
    """Whether this is a file; False for text that cannot be a path."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long, or with a null character
        return False


def is_directory(path: str | Path) -> bool:
    """Whether this is a directory; False for text that cannot be a path."""
    try:
        return Path(path).is_dir()
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
        temporary.unlink(missing_ok=True)  # a link of this name would be followed
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


@contextmanager
def staged_directory(out: Path) -> Iterator[Path]:
    """Yields a directory next to `out` that is renamed to `out` if the block succeeds, and removed if not.

    An existing `out` is replaced; the caller must check whether it may be.

    Raises:
        UsageError: a parent of `out` is a file, or another process created `out`.
        EnvironmentFailure: the disk is full, or the location is not writable.
    """
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        stage, old = (out.parent / f".{out.name}.{kind}-{os.getpid()}" for kind in ("partial", "old"))
        stage.mkdir()
        try:
            yield stage
            for file in [*stage.iterdir(), stage]:
                sync(file)
            if out.exists():
                out.rename(old)
            stage.rename(out)
            sync(out.parent)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except (FileExistsError, NotADirectoryError) as error:
        message = "a parent of the output is a file, or another process created the output meanwhile"
        raise UsageError(message, where=str(out), fix="choose another --out") from error
    except OSError as error:
        raise EnvironmentFailure(
            f"the output cannot be written: {error.strerror or error}",
            where=str(out),
            fix="free disk space or choose another --out",
        ) from error


def clear_leftovers(out: Path) -> None:
    """Removes leftovers of killed processes; restores `out` if a process was killed while replacing it."""
    import psutil

    out = out.resolve()
    for kind in ("old", "partial"):
        for left in out.parent.glob(f".{glob.escape(out.name)}.{kind}-*"):
            pid = left.name.rpartition("-")[2]
            if pid.isdecimal() and int(pid) != os.getpid() and psutil.pid_exists(int(pid)):
                continue
            if kind == "old" and not out.exists() and not left.is_symlink():
                left.rename(out)
            else:
                remove(left)


def check_vacant(out: Path) -> None:
    """Refuses to write to a location that is not empty.

    Raises:
        UsageError: `out` is a file, or a directory that is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        message = "the directory is not empty" if out.is_dir() else "the output is a file, not a directory"
        raise UsageError(message, where=str(out), fix="choose another --out")
