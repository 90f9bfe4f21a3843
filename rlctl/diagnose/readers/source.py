"""Opens a log: a plain or compressed file, standard input, or a ZIP archive of logs."""

from __future__ import annotations

import gzip
import math
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.diagnose.table import STDIN
from rlctl.errors import UsageError
from rlctl.leftovers import temporary_directory

_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
_CHUNK_BYTES, _LARGEST_UNPACKED = 1 << 16, 2 << 30


@dataclass
class LogSource:
    """One log to read."""

    path: Path  # the path that the user gave
    file: Path  # the log, decompressed: the same path, or a copy on disk
    notes: list[str] = field(default_factory=list)  # damage that was tolerated when decompressing
    head: bytes = b""  # the first bytes


@contextmanager
def opened(path: Path) -> Iterator[LogSource]:
    """Opens the log at `path`; compressed logs, and input that can be read only once, are copied to disk.

    Raises:
        OSError: the path cannot be read.
    """
    source = LogSource(path, path)
    with ExitStack() as stack:
        if path == STDIN or not path.is_file():
            pipe = sys.stdin.buffer if path == STDIN else stack.enter_context(path.open("rb"))
            source.file = stack.enter_context(_copied(pipe, source.notes))
        if _begins_with(source.file, _GZIP):
            packed = stack.enter_context(gzip.open(source.file))
            source.file = stack.enter_context(_copied(packed, source.notes, _LARGEST_UNPACKED))
        with source.file.open("rb") as stream:
            source.head = stream.read(_CHUNK_BYTES)
        yield source


def is_archive(path: Path) -> bool:
    """Whether the path is a ZIP archive that can be read."""
    try:
        return path.is_file() and _begins_with(path, _ZIP)
    except OSError:
        return False


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The directory itself, or a temporary one with the files of a ZIP archive.

    Raises:
        UsageError: the archive is damaged, encrypted, or too large when unpacked.
    """
    if path.is_dir():
        yield path
        return
    with temporary_directory("log") as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())  # no more than this is unpacked
                if size > _LARGEST_UNPACKED:
                    message = f"the archive expands to {size:,} bytes"
                    raise UsageError(message, where=str(path), fix="unpack it, and name a log")
                archive.extractall(folder)  # none outside the folder, whatever its name
        except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
            raise UsageError(f"it cannot be read as a zip archive: {error}", where=str(path)) from error
        yield folder


def _begins_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(magic)) == magic


@contextmanager
def _copied(stream: Any, notes: list[str], most: float = math.inf) -> Iterator[Path]:
    """Path of a file on disk with the first `most` bytes of the stream, up to the first damage."""
    with temporary_directory("log") as folder, (folder / "copy").open("wb") as copy:
        try:
            while chunk := stream.read1(_CHUNK_BYTES):
                if copy.tell() + len(chunk) > most:
                    notes.append(f"the compressed file expands to more than {most:,} bytes: these were read")
                    break
                copy.write(chunk)
        except EOFError:
            notes.append("the compressed file ends early: the part before the end was read")
        except (gzip.BadGzipFile, zlib.error):
            notes.append("the compressed file is damaged: the part before the damage was read")
        copy.flush()
        yield Path(copy.name)
