"""Opens compressed files, and files in zip archives, as bytes; refuses those that expand too much.

A file in an archive has the path `ARCHIVE.zip/NAME`. Nothing is written to where an archive's names point.
"""

from __future__ import annotations

import bz2
import io
import lzma
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from tempfile import NamedTemporaryFile
from typing import Any

import pyarrow as pa

from rlctl.errors import UsageError

#: Suffix → name of the compression.
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_OPEN: dict[str, Callable[[Any], Any]] = {
    "gzip": lambda raw: pa.CompressedInputStream(raw, "gzip"),
    "zstd": lambda raw: pa.CompressedInputStream(raw, "zstd"),
    "bzip2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
}
#: What reading damaged compressed data raises, besides OSError and EOFError.
DAMAGED = (lzma.LZMAError, zlib.error, zipfile.BadZipFile, NotImplementedError, pa.ArrowException)
ZIP = ".zip"
#: Text expands 3 to 20 times. More than so many times the compressed bytes, and so many bytes, is refused.
MAX_EXPANSION, EXPANDED_BYTES = 300, 256 << 20
MAX_MEMBERS = 10_000
_BUFFER_BYTES = 1 << 16


def on_disk(path: Path) -> Path:
    """The file of a path: its archive if it is in one, else the path."""
    archives = (parent for parent in path.parents if parent.suffix.lower() == ZIP and parent.is_file())
    return next(archives, path)


def members(archive: Path) -> list[Path]:
    """The paths of the files in a zip archive, ordered by name, without hidden ones.

    Raises:
        UsageError: the archive is damaged, encrypted or expands too much, or a name leads out of it.
    """

    def refused(what: str, fix: str) -> UsageError:
        return UsageError(what, where=str(archive), fix=fix)

    try:
        with zipfile.ZipFile(archive) as opened:
            entries = opened.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise refused(f"it cannot be read as a zip archive: {error}", "get it again") from error
    if len(entries) > MAX_MEMBERS:
        raise refused(f"the archive has {len(entries):,} files, more than {MAX_MEMBERS:,}", "unpack it")
    size = sum(entry.file_size for entry in entries)
    if size > max(EXPANDED_BYTES, MAX_EXPANSION * archive.stat().st_size):
        raise refused(
            f"the archive expands to {size:,} bytes, too many for its size", "unpack it if you trust it"
        )
    found = []
    for entry in entries:
        name = PurePosixPath(entry.filename.replace("\\", "/"))
        if name.is_absolute() or ".." in name.parts or PureWindowsPath(name).drive:
            raise refused(
                f"a name in the archive leads out of it: {entry.filename!r}", "do not use this archive"
            )
        if entry.is_dir() or any(part.startswith((".", "__MACOSX")) for part in name.parts):
            continue
        if entry.flag_bits & 1:
            raise refused(f"the archive is encrypted: {entry.filename}", "unpack it")
        found.append(archive / name)
    return sorted(found)


@contextmanager
def _raw(path: Path) -> Iterator[Any]:
    """The bytes of a file on disk, or in an archive."""
    archive = on_disk(path)
    if archive == path:
        with path.open("rb") as file:
            yield file
        return
    with zipfile.ZipFile(archive) as opened:
        name = path.relative_to(archive).as_posix()
        names = {entry.filename.replace("\\", "/"): entry for entry in opened.infolist()}
        if name not in names:
            raise UsageError("the archive has no such file", where=str(path))
        with opened.open(names[name]) as member:
            yield member


@contextmanager
def as_file(path: Path) -> Iterator[Path]:
    """A file on disk with the content of this path: itself, or a temporary copy from its archive."""
    if on_disk(path) == path:
        yield path
        return
    with _raw(path) as member, NamedTemporaryFile(suffix=path.suffix) as copy:
        shutil.copyfileobj(member, copy)
        copy.flush()
        yield Path(copy.name)


@contextmanager
def decompressed(path: Path) -> Iterator[tuple[io.BufferedReader, Callable[[], int]]]:
    """The content of a file, decompressed by its suffix or first bytes; and a function: bytes read so far."""
    with _raw(path) as opened:
        raw = opened if hasattr(opened, "peek") else io.BufferedReader(opened)
        head = raw.peek(8)
        codec = CODECS.get(path.suffix.lower()) or next(
            (kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None
        )
        if codec is None:
            yield (
                raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, _BUFFER_BYTES),
                raw.tell,
            )
            return
        with _OPEN[codec](raw) as plain:
            yield io.BufferedReader(_Limited(plain, raw.tell, path), _BUFFER_BYTES), raw.tell


class _Limited(io.RawIOBase):
    """Decompressed bytes; a UsageError if they are too many for the compressed bytes read so far."""

    def __init__(self, file: Any, position: Callable[[], int], path: Path) -> None:
        self._file, self._position, self._path = file, position, path
        self._done = 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads decompressed bytes into the buffer; returns their number."""
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._done += len(data)
        if self._done > max(EXPANDED_BYTES, MAX_EXPANSION * self._position()):
            what = f"the file expands to more than {self._done:,} bytes, too many for its size"
            raise UsageError(what, where=str(self._path), fix="decompress it if you trust it")
        return len(data)
