"""Heartbeats of a run's ranks: one file per node in the run directory, with a slot for each rank of the node.

A rank keeps the file of its node open: it writes its slot and reads the others without opening anything.

    slot 0   slot 1   …   slot n−1   summary of the other nodes, by one rank of the node

A record is its CRC-32 in eight hexadecimal digits, then JSON, then zero bytes: a record that is read while it
is written differs from its checksum, and counts as absent.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from rlctl.run_files import create_directory, remove

_DIRECTORY = ".ranks"
_READ_AND_WRITE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
#: Bytes of a slot, of the summary behind the slots, and of the checksum of a record.
_SLOT, _SUMMARY, _CHECKSUM = 1024, 16384, 8
#: Characters of a place and of a host that a slot holds, whatever they are.
_LONGEST_PLACE, _LONGEST_HOST = 100, 50
#: Names that a summary lists.
_NAMES = 8


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat of a rank.

    Attributes:
        number: increases with every heartbeat.
        phases: phases begun so far; all ranks begin the same ones, so the others wait for the lowest number.
        place: the current phase, in words.
        idle_s: seconds since the rank last made progress.
    """

    number: int
    phases: int
    place: str
    idle_s: float
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Names:
    """Some ranks, in words: the first of them, and how many they are."""

    first: tuple[str, ...] = ()
    count: int = 0

    def __add__(self, other: Names) -> Names:
        return Names((*self.first, *other.first)[:_NAMES], self.count + other.count)

    def __str__(self) -> str:
        more = self.count - len(self.first)
        return ", ".join(self.first) + (f" and {more} more" if more else "")


@dataclass(frozen=True, slots=True)
class Summary:
    """What is known about some ranks.

    Attributes:
        idle_s: seconds since one of them last made progress; infinite without a rank.
        lowest: the lowest rank that is running; -1: none is.
        silent: those whose heartbeats have stopped, for up to `silent_s` seconds.
        unjoined: how many of the silent ones were not heard in this run.
        left_over: whether one of those has left a heartbeat, maybe in an earlier run.
        phases: the lowest number of phases that a rank has begun; -1: no rank was heard.
        behind: the ranks with that number.
    """

    idle_s: float = float("inf")
    lowest: int = -1
    silent: Names = Names()
    silent_s: float = 0.0
    unjoined: int = 0
    left_over: bool = False
    phases: int = -1
    behind: Names = Names()

    def __add__(self, other: Summary) -> Summary:
        """What is known about the ranks of both."""
        running = [each.lowest for each in (self, other) if each.lowest >= 0]
        heard = [each for each in (self, other) if each.phases >= 0]
        phases = min((each.phases for each in heard), default=-1)
        return Summary(
            idle_s=min(self.idle_s, other.idle_s),
            lowest=min(running, default=-1),
            silent=self.silent + other.silent,
            silent_s=max(self.silent_s, other.silent_s),
            unjoined=self.unjoined + other.unjoined,
            left_over=self.left_over or other.left_over,
            phases=phases,
            behind=sum((each.behind for each in heard if each.phases == phases), Names()),
        )


_Record = TypeVar("_Record", Beat, Summary)


class NodeFile:
    """The file of one node, held open.

    Every method raises an `OSError` if the run directory is missing, or the disk is full.

    Args:
        size: ranks of the node.
    """

    def __init__(self, run_dir: Path, node: int, size: int) -> None:
        self._run_dir = run_dir
        self._path = _file(run_dir, node)
        self._size = size
        self._handle: int | None = None

    def write(self, slot: int, beat: Beat) -> None:
        """Replaces the heartbeat of the node's rank `slot`."""
        os.pwrite(self._opened(), _packed(_shortened(beat), _SLOT), slot * _SLOT)

    def write_summary(self, number: int, summary: Summary) -> None:
        """Replaces the summary of the other nodes, and makes all slots visible to other nodes.

        Args:
            number: increases with every summary.
        """
        handle = self._opened()
        os.pwrite(handle, _packed(summary, _SUMMARY, number), self._size * _SLOT)
        os.fdatasync(handle)

    def beats(self) -> dict[int, Beat]:
        """The heartbeats of the node's ranks, by slot."""
        return _beats(os.pread(self._opened(), self._size * _SLOT, 0))

    def summary(self) -> tuple[int, Summary] | None:
        """Number and content of the last summary; None: there is none."""
        return _unpacked_summary(os.pread(self._opened(), _SUMMARY, self._size * _SLOT))

    def leave(self, slot: int) -> None:
        """Empties a slot and closes the file; the last rank of the node removes it."""
        handle = self._opened()
        os.pwrite(handle, bytes(_SLOT), slot * _SLOT)
        if not any(os.pread(handle, self._size * _SLOT, 0)):
            remove(self._path)
        os.close(handle)
        self._handle = None
        with contextlib.suppress(OSError):
            self._path.parent.rmdir()  # succeeds on the last node

    def _opened(self) -> int:
        """Descriptor of the file at the path, which may have been moved away with an earlier run's files."""
        if self._handle is not None and not _is_at(self._path, self._handle):
            os.close(self._handle)
            self._handle = None
        if self._handle is None:
            if not self._run_dir.is_dir():
                raise FileNotFoundError(self._run_dir)
            create_directory(self._path.parent)
            self._handle = os.open(self._path, _READ_AND_WRITE, 0o644)
        return self._handle


def beats_of_node(run_dir: Path, node: int, size: int) -> dict[int, Beat]:
    """The heartbeats of a node's ranks, by slot; empty if it has left none.

    Args:
        size: ranks of the node.
    """
    try:
        # someone else may have written the directory: a pipe would wait for a writer
        handle = os.open(_file(run_dir, node), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        return _beats(os.pread(handle, size * _SLOT, 0))
    except OSError:
        return {}
    finally:
        os.close(handle)


def _file(run_dir: Path, node: int) -> Path:
    return run_dir / _DIRECTORY / f"node-{node:05d}"


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False


def _shortened(beat: Beat) -> Beat:
    return replace(beat, place=beat.place[:_LONGEST_PLACE], host=beat.host[:_LONGEST_HOST])


def _packed(record: Beat | Summary, num_bytes: int, number: int = 0) -> bytes:
    content = asdict(record) if isinstance(record, Beat) else {"number": number, "summary": asdict(record)}
    text = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
    return f"{zlib.crc32(text):08x}".encode().join((b"", text)).ljust(num_bytes, b"\0")[:num_bytes]


def _unpacked(record: bytes) -> dict[str, object] | None:
    """The content of a record; None: it is empty or incomplete."""
    checksum = record[:_CHECKSUM]
    text = record[_CHECKSUM:].rstrip(b"\0")
    if checksum != f"{zlib.crc32(text):08x}".encode():
        return None
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _beats(slots: bytes) -> dict[int, Beat]:
    found: dict[int, Beat] = {}
    for slot in range(len(slots) // _SLOT):
        content = _unpacked(slots[slot * _SLOT : (slot + 1) * _SLOT])
        with contextlib.suppress(TypeError):  # of another version
            if content:
                found[slot] = Beat(**content)  # type: ignore[arg-type]
    return found


def _unpacked_summary(record: bytes) -> tuple[int, Summary] | None:
    content = _unpacked(record)
    try:
        if content is None:
            return None
        fields = dict(content["summary"])  # type: ignore[call-overload]
        for name in ("silent", "behind"):
            fields[name] = Names(tuple(fields[name]["first"]), fields[name]["count"])
        return int(content["number"]), Summary(**fields)  # type: ignore[call-overload]
    except (KeyError, TypeError, ValueError):  # of another version
        return None
