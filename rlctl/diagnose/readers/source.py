"""Opens a log: a plain or compressed file, or standard input."""

from __future__ import annotations

import gzip
import io
import shutil
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from rlctl.diagnose.table import STDIN
from rlctl.errors import UsageError

OpenFile = Callable[[Path], io.RawIOBase]
_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
#: Limits of an archive: bytes and files when unpacked.
_LARGEST_UNPACKED, _MOST_FILES = 2 << 30, 10_000
_CHUNK_BYTES = 1 << 16


class LogSource:
    """One file to read."""

    def __init__(self, path: Path, file: Path, open_file: OpenFile) -> None:
        self.path = path  # the path that the user gave
        self.notes: list[str] = []  # damage that was tolerated when decompressing; filled while reading
        self._file, self._open_file = file, open_file  # the same path, or a copy on disk
        with file.open("rb") as stream:
            self.is_gzip = stream.read(len(_GZIP)) == _GZIP
        with self.open() as stream:
            self.head = stream.read(_CHUNK_BYTES)  # the first bytes, decompressed

    def open(self) -> IO[bytes]:
        """The decompressed bytes from the start."""
        self.notes.clear()
        raw = self._open_file(self._file)
        stream = _TolerantGzip(raw, self.notes) if self.is_gzip else raw
        return io.BufferedReader(stream, _CHUNK_BYTES)

    @contextmanager
    def on_disk(self) -> Iterator[Path]:
        """Path of a file with the decompressed bytes, for libraries that seek."""
        if not self.is_gzip:
            yield self._file
            return
        with self.open() as stream, _copied(stream) as copy:
            yield copy


@contextmanager
def opened(path: Path, open_file: OpenFile) -> Iterator[LogSource]:
    """Opens the source at `path`; input that can be read only once (standard input) is copied to disk.

    Raises:
        OSError: the path cannot be read.
    """
    if path.is_file() and path != STDIN:
        yield LogSource(path, path, open_file)
        return
    with nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb") as pipe, _copied(pipe) as copy:
        yield LogSource(path, copy, open_file)


def is_archive(path: Path) -> bool:
    """Whether the path is a ZIP archive."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(_ZIP)) == _ZIP


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The directory itself, or a temporary one with the files of a ZIP archive.

    Raises:
        UsageError: the archive is damaged, encrypted, or larger than a log when unpacked.
    """
    if path.is_dir():
        yield path
        return
    left = _LARGEST_UNPACKED
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                for number, member in enumerate(archive.infolist()):
                    inside = Path(
                        folder, *(part for part in Path(member.filename).parts if part.strip("./\\"))
                    )
                    if member.is_dir() or number >= _MOST_FILES:
                        continue
                    inside.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(member) as packed, inside.open("wb") as file:
                        while chunk := packed.read(min(_CHUNK_BYTES, left + 1)):
                            left -= len(chunk)
                            if left < 0:  # the sizes that the archive states may be wrong
                                what = f"unpacks to more than {_LARGEST_UNPACKED >> 30} GiB"
                                raise UsageError(what, where=str(path), fix="unpack it, and name a log")
                            file.write(chunk)
        except (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError) as error:
            raise UsageError(f"a ZIP archive that cannot be read: {error}", where=str(path)) from error
        yield Path(folder)


@contextmanager
def _copied(stream: IO[bytes]) -> Iterator[Path]:
    """Path of a file on disk with the bytes of the stream."""
    with tempfile.NamedTemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.flush()
        yield Path(copy.name)


class _TolerantGzip(io.RawIOBase):
    """Decompressed bytes up to the first damage, where `gzip` would raise."""

    def __init__(self, raw: io.RawIOBase, notes: list[str]) -> None:
        self._raw, self._notes = raw, notes
        self._file = gzip.GzipFile(fileobj=io.BufferedReader(raw))

    def readable(self) -> bool:
        """Returns True."""
        return True

    def close(self) -> None:
        """Closes the compressed file, too."""
        self._raw.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Reads at most one chunk into the buffer; returns 0 at the end."""
        try:
            chunk = self._file.read1(len(buffer))
        except EOFError:
            self._notes.append("the compressed file ends early: the part before the end was read")
            return 0
        except (gzip.BadGzipFile, zlib.error):
            self._notes.append("the compressed file is damaged: the part before the damage was read")
            return 0
        buffer[: len(chunk)] = chunk
        return len(chunk)
