"""The large files of a checkpoint: written at once, or held in memory and written later, during training.

What engines save goes through `StateFiles`. `HeldFiles` keeps the bytes that would be written, so that the
models may change while a thread writes them. Both leave the same files.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from rlctl.engine.checkpoint import hash_and_sync

#: Bytes of memory that are reserved at once, and given back once they are in the file.
_BLOCK = 64 << 20
#: Suffix of a file that is being written, so that no half of a model has the name of a whole one.
_UNFINISHED = ".part"


class StateFiles:
    """Writes each file at once, waits until it is on the disk, and hashes it.

    Attributes:
        are_held: whether files are written later, by `write`.
        digests: file → its SHA-256, of those written so far by this rank.
    """

    are_held = False

    def __init__(self) -> None:
        self.digests: dict[Path, str] = {}

    @contextmanager
    def open(self, path: Path) -> Iterator[IO[bytes]]:
        """Context of a new file, to be written from its start to its end.

        Raises:
            OSError: from the file system.
        """
        with path.open("wb") as file:  # a full disk is then Python's error, which says so
            yield file
        self.digests[path] = hash_and_sync(path)

    def put(self, path: Path, write: Callable[[Path], object]) -> None:
        """Creates a file by `write`, which must not read what training changes."""
        write(path)
        self.digests[path] = hash_and_sync(path)


class HeldFiles(StateFiles):
    """Holds files in memory until `write`, which may run in another thread."""

    are_held = True

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[Path, Callable[[Path], object]]] = []

    @contextmanager
    def open(self, path: Path) -> Iterator[IO[bytes]]:
        """Context of a file in memory."""
        content = Memory()
        yield cast(IO[bytes], content)
        self._held.append((path, content.move_to))

    def put(self, path: Path, write: Callable[[Path], object]) -> None:
        """Keeps `write` and what it holds."""
        self._held.append((path, write))

    def write(self) -> None:
        """Writes the files, in the order of their creation, and frees the memory of each.

        Raises:
            OSError: from the file system.
        """
        while self._held:
            path, write = self._held.pop(0)
            unfinished = path.with_name(f".{path.name}{_UNFINISHED}")
            write(unfinished)
            self.digests[path] = hash_and_sync(unfinished)
            unfinished.rename(path)


class Memory(io.RawIOBase):
    """A file in memory that is written once, from its start to its end, without ever being copied to grow."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[mmap.mmap] = []
        self._length = 0

    def writable(self) -> bool:
        """Whether it can be written."""
        return True

    def tell(self) -> int:
        """Number of bytes so far."""
        return self._length

    def write(self, data: Any, /) -> int:
        """Appends bytes; returns their number."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            at = self._length % _BLOCK
            if at == 0:
                self._blocks.append(_block())
            count = min(_BLOCK - at, len(view) - done)
            self._blocks[-1][at : at + count] = view[done : done + count]
            self._length += count
            done += count
        return done

    def move_to(self, path: Path) -> None:
        """Writes the content to a file, and gives its memory back on the way.

        Raises:
            OSError: from the file system.
        """
        with path.open("wb", buffering=0) as file:
            while self._blocks:
                rest = memoryview(self._blocks.pop(0))[: min(_BLOCK, self._length)]
                self._length -= len(rest)
                while rest:  # a call writes 2 GiB at most, or less where the disk becomes full
                    rest = rest[os.write(file.fileno(), rest) :]


def _block() -> mmap.mmap:
    """Memory of its own, which a process forked meanwhile does not hold any longer than this one."""
    block = mmap.mmap(-1, _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):  # Linux
        block.madvise(mmap.MADV_DONTFORK)
    return block
