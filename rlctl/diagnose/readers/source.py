"""Opening what was named: plain or compressed files, and standard input."""

from __future__ import annotations

import io
import os
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
_GZIP_WINDOW = zlib.MAX_WBITS | 16  # with gzip's header
_CHUNK_BYTES = 1 << 16
#: Told how many of a file's bytes were read so far, and how many there are.
Watch = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Source:
    """One file to read.

    Attributes:
        path: as the user knows it.
        file: where its bytes lie.
        is_gzip: whether they are compressed.
        head: the first bytes, decompressed.
        notes: what had to be tolerated when decompressing, once it was read.
        watch: told while it is read.
    """

    path: Path
    file: Path
    is_gzip: bool
    head: bytes
    notes: list[str]
    watch: Watch | None = None

    def open(self) -> IO[bytes]:
        """The decompressed bytes from the start."""
        self.notes.clear()
        return _open(self.file, self.is_gzip, self.notes, self.watch)

    @contextmanager
    def on_disk(self) -> Iterator[Path]:
        """A path that holds the decompressed bytes, for libraries that want to seek."""
        if not self.is_gzip:
            yield self.file
            return
        with tempfile.NamedTemporaryFile() as copy, self.open() as stream:
            shutil.copyfileobj(stream, copy)
            copy.flush()
            yield Path(copy.name)


@contextmanager
def opened(path: Path, watch: Watch | None = None) -> Iterator[Source]:
    """The source at `path`; what can be read only once, as standard input, is kept on disk meanwhile.

    Raises:
        OSError: it cannot be read.
    """
    if path.is_file() and path != STDIN:
        yield _source(path, path, watch)
        return
    with tempfile.NamedTemporaryFile() as copy:
        with nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb") as pipe:
            shutil.copyfileobj(pipe, copy)
        copy.flush()
        yield _source(path, Path(copy.name), watch)


def _source(path: Path, file: Path, watch: Watch | None) -> Source:
    with file.open("rb") as stream:
        is_gzip = stream.read(len(_GZIP)) == _GZIP
    with _open(file, is_gzip, []) as stream:
        return Source(path, file, is_gzip, stream.read(_CHUNK_BYTES), [], watch)


def _open(file: Path, is_gzip: bool, notes: list[str], watch: Watch | None = None) -> IO[bytes]:
    if not is_gzip:
        return _raw(file, watch)
    return io.BufferedReader(_Chunks(_decompressed(file, notes, watch)), _CHUNK_BYTES)


def _raw(file: Path, watch: Watch | None) -> IO[bytes]:
    stream = file.open("rb", buffering=0 if watch else -1)
    return io.BufferedReader(_Chunks(_watched(stream, watch)), _CHUNK_BYTES) if watch else stream


def _watched(stream: IO[bytes], watch: Watch) -> Iterator[bytes]:
    with stream:
        total = os.fstat(stream.fileno()).st_size
        while chunk := stream.read(_CHUNK_BYTES):
            watch(stream.tell(), total)
            yield chunk


def _decompressed(file: Path, notes: list[str], watch: Watch | None) -> Iterator[bytes]:
    """As far as it goes: `gzip` throws away what precedes the end of a file that was cut."""
    decompressor, is_whole, data = zlib.decompressobj(_GZIP_WINDOW), True, b""
    with _raw(file, watch) as stream:
        while data := data or stream.read(_CHUNK_BYTES):
            try:
                yield decompressor.decompress(data, _CHUNK_BYTES)
            except zlib.error:
                notes.append("the compressed file is damaged: what precedes the damage was read")
                return
            is_whole, data = False, decompressor.unconsumed_tail
            if decompressor.eof:  # several compressed parts may follow each other
                is_whole, data = True, decompressor.unused_data.lstrip(b"\0")
                decompressor = zlib.decompressobj(_GZIP_WINDOW)
        yield decompressor.flush()
    if not is_whole:
        notes.append("the compressed file ends early: what there is of it was read")


class _Chunks(io.RawIOBase):
    """A stream of chunks of bytes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as one chunk goes; 0 at the end."""
        while not self._rest:
            if (chunk := next(self._chunks, None)) is None:
                return 0
            self._rest = chunk
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
