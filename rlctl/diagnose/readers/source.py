"""Opening what was named: plain or compressed files, and standard input."""

from __future__ import annotations

import gzip
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

_GZIP = b"\x1f\x8b"
_HEAD_BYTES = 1 << 16
#: Stands for standard input.
STDIN = Path("-")


@dataclass(frozen=True, slots=True)
class Source:
    """One file to read.

    Attributes:
        path: as the user knows it.
        file: where its bytes lie.
        is_gzip: whether they are compressed.
        head: the first bytes, decompressed.
    """

    path: Path
    file: Path
    is_gzip: bool
    head: bytes

    def open(self) -> IO[bytes]:
        """The decompressed bytes from the start."""
        if self.is_gzip:
            return cast(IO[bytes], gzip.open(self.file, "rb"))
        return self.file.open("rb")

    @contextmanager
    def on_disk(self) -> Iterator[Path]:
        """A path that holds the decompressed bytes, for libraries that want to seek."""
        if not self.is_gzip:
            yield self.file
            return
        with tempfile.NamedTemporaryFile(suffix=self.path.stem) as copy, self.open() as stream:
            shutil.copyfileobj(stream, copy)
            copy.flush()
            yield Path(copy.name)


@contextmanager
def opened(path: Path) -> Iterator[Source]:
    """The source at `path`; standard input is kept on disk meanwhile.

    Raises:
        OSError: it cannot be read.
    """
    if path != STDIN:
        yield _source(path, path)
        return
    with tempfile.NamedTemporaryFile() as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield _source(path, Path(copy.name))


def _source(path: Path, file: Path) -> Source:
    with file.open("rb") as stream:
        is_gzip = stream.read(2) == _GZIP
        stream.seek(0)
        head = b"" if is_gzip else stream.read(_HEAD_BYTES)
    source = Source(path, file, is_gzip, head)
    if not is_gzip:
        return source
    with source.open() as stream:
        try:
            head = stream.read(_HEAD_BYTES)
        except EOFError:  # cut short within the head: what can be read is read line by line
            with source.open() as again:
                head = again.read1(_HEAD_BYTES)  # type: ignore[attr-defined]
    return Source(path, file, is_gzip, head)
