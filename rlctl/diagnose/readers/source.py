"""Opens a log: a plain or compressed file, or standard input."""

from __future__ import annotations

import gzip
import io
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlctl.diagnose.table import STDIN

_GZIP = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 16
#: Called with the number of bytes read so far, and the size of the file.
Watch = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LogSource:
    """One file to read."""

    path: Path  # the path that the user gave
    file: Path  # the file to read: the same, or a copy on disk
    is_gzip: bool  # whether the file is compressed
    head: bytes  # the first bytes, decompressed
    notes: list[str]  # damage that was tolerated when decompressing; filled while reading
    watch: Watch | None = None  # called while the file is read

    def open(self) -> IO[bytes]:
        """The decompressed bytes from the start."""
        self.notes.clear()
        return _open(self.file, self.is_gzip, self.notes, self.watch)

    @contextmanager
    def on_disk(self) -> Iterator[Path]:
        """Path of a file with the decompressed bytes, for libraries that seek."""
        if not self.is_gzip:
            yield self.file
            return
        with self.open() as stream, _copied(stream) as copy:
            yield copy


@contextmanager
def opened(path: Path, watch: Watch | None = None) -> Iterator[LogSource]:
    """Opens the source at `path`; input that can be read only once (standard input) is copied to disk.

    Raises:
        OSError: the path cannot be read.
    """
    if path.is_file() and path != STDIN:
        yield _source(path, path, watch)
        return
    with nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb") as pipe, _copied(pipe) as copy:
        yield _source(path, copy, watch)


@contextmanager
def _copied(stream: IO[bytes]) -> Iterator[Path]:
    """Path of a file on disk with the bytes of the stream."""
    with tempfile.NamedTemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.flush()
        yield Path(copy.name)


def _source(path: Path, file: Path, watch: Watch | None) -> LogSource:
    with file.open("rb") as stream:
        is_gzip = stream.read(len(_GZIP)) == _GZIP
    with _open(file, is_gzip, []) as stream:
        return LogSource(path, file, is_gzip, stream.read(_CHUNK_BYTES), [], watch)


def _open(file: Path, is_gzip: bool, notes: list[str], watch: Watch | None = None) -> IO[bytes]:
    raw: IO[bytes] = io.BufferedReader(_Watched(file, watch), _CHUNK_BYTES) if watch else file.open("rb")
    return io.BufferedReader(_TolerantGzip(raw, notes), _CHUNK_BYTES) if is_gzip else raw


class _Watched(io.FileIO):
    """A file that reports its read position."""

    def __init__(self, file: Path, watch: Watch) -> None:
        super().__init__(file)
        self._watch, self._total = watch, file.stat().st_size

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer; returns 0 at the end."""
        size = super().readinto(buffer) or 0
        self._watch(self.tell(), self._total)
        return size


class _TolerantGzip(io.RawIOBase):
    """Decompressed bytes up to the first damage, where `gzip` would raise."""

    def __init__(self, raw: IO[bytes], notes: list[str]) -> None:
        self._raw, self._notes = raw, notes
        self._file = gzip.GzipFile(fileobj=raw)

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
