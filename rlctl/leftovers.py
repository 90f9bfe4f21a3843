"""Ends and removes what killed processes leave: directories in /tmp and /dev/shm, shared memory, servers.

A directory created here has host and process id in its name, and is locked while the process lives. The lock
protects directories of other containers, where process ids have a different meaning.

A process with such a directory has a keeper, a process of its own that no signal to the first one reaches:

    owner  ──what is to be removed──  keeper

When the owner has ended, however, the keeper kills the process groups that it was told, and removes the
directories, and the shared memory segments that the owner or its descendants held. Names of segments that
libraries create (`psm_…` of Python's multiprocessing, which engines use) do not identify a process, so the
keeper looks at what is held while the processes live, and records it. What a killed keeper leaves is removed
by the next start. Standard library only, as the keeper's imports. Linux; elsewhere the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlctl.processes import with_descendants

SHARED_MEMORY = Path("/dev/shm")
_SEGMENTS = "shared-memory"
#: Seconds: between two looks of a keeper; in which a server ends after its owner; in which what is left after
#: the owner's end can be removed.
_LOOK_S, _KILL_S, _STAY_S = 2.0, 8.0, 12.0
#: Environment variable with the directory for temporary files outside `own_temporary_files`.
_LASTING = "RLCTL_LASTING_TMPDIR"
_KEEP = "import sys; sys.path[:0] = sys.argv[2:]; from rlctl.leftovers import main; main()"
#: Unix sockets have at most 107 characters; libraries add up to 42 to the directory.
_LONGEST_PATH = 65
#: Process id of an owner → the keeper that it has started.
_keepers: dict[int, subprocess.Popen[bytes]] = {}


def own_directory(kind: str, parent: Path | None = None, *, is_kept: bool = True) -> tuple[Path, int]:
    """Creates a directory `rlctl-<kind>-<host>-<pid>-…`; returns it and the descriptor that holds its lock.

    `kind` consists of letters. The default parent is the directory for temporary files.

    Args:
        is_kept: false: starts no keeper, because a process above this one has one (`keep_temporary_files`).

    Raises:
        OSError: it cannot be created.
    """
    path = Path(tempfile.mkdtemp(prefix=f"rlctl-{kind}-{_host()}-{os.getpid()}-", dir=parent))
    handle = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):  # not every file system locks directories
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if is_kept:
        _tell(f"directory {path.absolute()}")
    return path, handle


@contextmanager
def temporary_directory(kind: str, *, is_kept: bool = True) -> Iterator[Path]:
    """Yields an `own_directory`, which is removed at the end; if the process is killed, by its keeper."""
    path, handle = own_directory(kind, is_kept=is_kept)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


@contextmanager
def own_temporary_files() -> Iterator[None]:
    """Context in which temporary files of this process, its libraries and children are in a directory that is
    removed with it, also if it is killed; first removes what earlier processes left.

    For a process that ends with what it does then: libraries remember where their files were.
    """
    clear()
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    is_outer = os.environ.setdefault(_LASTING, tempfile.gettempdir()) == tempfile.gettempdir()
    path, handle = own_directory("tmp")
    _tell(f"record {path.absolute()}")
    if len(str(path)) <= _LONGEST_PATH:
        tempfile.tempdir = os.environ["TMPDIR"] = str(path)
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        os.environ.pop("TMPDIR", None)
        os.environ.update({"TMPDIR": before[1]} if before[1] is not None else {})
        if is_outer:
            os.environ.pop(_LASTING, None)
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def has_own_temporary_files() -> bool:
    """Whether this process, or one above it, is in `own_temporary_files`."""
    return _LASTING in os.environ and os.environ.get("TMPDIR") != os.environ[_LASTING]


def lasting_directory() -> str:
    """The directory for temporary files that are left for the user."""
    return os.environ.get(_LASTING) or tempfile.gettempdir()


def keep_temporary_files() -> None:
    """Starts the keeper of this process, which also removes directories of descendants that were killed."""
    _tell(f"parent {tempfile.gettempdir()}")


def end_group_with_me(group: int) -> None:
    """Lets a process group end some seconds after this process, or after the group's first process."""
    _tell(f"group {group}")


def clear(parent: Path | None = None) -> bool:
    """Remove directories and shared memory of killed processes of this host and user.

    Searches `parent`; default: the directory for temporary files, and shared memory.

    Returns:
        Whether all were removed; a process that still ends can hold one.
    """
    is_done = True
    for folder in [parent] if parent else {Path(tempfile.gettempdir()), SHARED_MEMORY}:
        for path in folder.glob(f"rlctl-*-{_host()}-*"):
            pid = path.name.rsplit("-", 2)[-2]
            if not pid.isdecimal() or _lives(int(pid)) or not _is_ours(path):
                continue
            if _is_locked(path):
                is_done = False
                continue
            with contextlib.suppress(OSError):
                _free((path / _SEGMENTS).read_text().split())
            shutil.rmtree(path, ignore_errors=True)
    return is_done


def _host() -> str:
    """Short and without a dash; the ids of two hosts with common directories differ."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _tell(line: str) -> None:
    """Tells this process's keeper what to remove; starts it if there is none."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # a keeper that was killed; no processes or memory left
        keeper = _keepers.get(os.getpid())
        if not keeper:
            command = [
                sys.executable,
                "-I",
                "-S",
                "-c",
                _KEEP,
                str(os.getpid()),
                str(Path(__file__).parents[1]),
            ]
            keeper = subprocess.Popen(
                command,
                cwd="/",
                env={},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert keeper.stdin
            keeper.returncode = 0  # nobody waits for it: it lives longer
            os.set_blocking(keeper.stdin.fileno(), False)
            _keepers[os.getpid()] = keeper
        assert keeper.stdin
        os.write(keeper.stdin.fileno(), f"{line}\n".encode())


def main() -> None:
    """Runs the keeper of the process that the command line names."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    _Keeper(int(sys.argv[1])).run()


class _Keeper:
    """What is to be removed after a process's end.

    Args:
        owner: the process, parent of this one.
    """

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._text = b""
        self._parents = set[Path]()
        self._directories = list[Path]()
        self._descendants: set[int] = set()
        self._groups: dict[int, int] = {}  # process group → descriptor of its first process
        self._kill_at: dict[int, float] = {}  # process group → monotonic time
        self._segments: set[str] = set()
        self._record: Path | None = None  # file for the next start, if this process is killed too
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        with contextlib.suppress(
            OSError
        ):  # a kernel before 5.3, or the owner has ended: seen by its children
            self._poll.register(os.pidfd_open(owner), select.POLLIN)

    def run(self) -> None:
        """Returns when the owner has ended and nothing is left of it."""
        while os.getppid() == self._owner and _lives(self._owner):
            self._poll.poll(_LOOK_S * 1000)
            self._read()
            self._look()
        self._read()
        deadline = time.monotonic() + _STAY_S
        while not self._clean() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _read(self) -> None:
        os.set_blocking(0, False)
        with contextlib.suppress(BlockingIOError, KeyError):
            while read := os.read(0, 1 << 16):
                self._text += read
            self._poll.unregister(0)  # closed
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            kind, _, value = os.fsdecode(line).partition(" ")
            if kind == "directory":
                self._directories = [path for path in self._directories if path.is_dir()] + [Path(value)]
                self._parents.add(Path(value).parent)
            elif kind == "record":
                self._record = Path(value) / _SEGMENTS
            elif kind == "parent":
                self._parents.add(Path(value))
            elif kind == "group":
                with contextlib.suppress(ProcessLookupError):
                    self._groups[int(value)] = os.pidfd_open(int(value))

    def _look(self) -> None:
        """Records the segments in use, ends groups without their first process, removes what is left."""
        self._descendants = {*with_descendants([self._owner])} - {self._owner, os.getpid()}
        held = set().union(*map(_held, [self._owner, *self._descendants]))
        if held - self._segments:
            self._segments |= held
            if self._record:
                with contextlib.suppress(OSError):
                    self._record.write_text("\n".join(sorted(self._segments)))
        ended = [group for group, handle in self._groups.items() if select.select([handle], [], [], 0)[0]]
        self._end(ended)
        for parent in self._parents:
            clear(parent)

    def _end(self, groups: list[int]) -> None:
        """Kills those of the groups that live for `_KILL_S` from now or from an earlier call on."""
        now = time.monotonic()
        for group in groups:
            lives = group_lives(group)
            if lives and now >= self._kill_at.setdefault(group, now + _KILL_S):
                os.killpg(group, signal.SIGKILL)
            elif not lives:
                os.close(self._groups.pop(group))
                self._kill_at.pop(group, None)

    def _clean(self) -> bool:
        """Ends and removes what has to be; whether all is done."""
        self._descendants = {pid for pid in self._descendants if _lives(pid)}
        for pid in self._descendants:
            self._segments |= _held(pid)
        self._end([*self._groups])
        cleared = [clear(parent) for parent in self._parents]
        _free([*self._segments])
        is_left = self._groups or self._descendants or any(map(Path.exists, self._directories))
        return all(cleared) and not is_left


def group_lives(group: int) -> bool:
    """Whether a process group has a process, maybe a zombie."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _lives(pid: int) -> bool:
    """Whether a process exists and is no zombie, which another process did not wait for."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] not in ([b"Z"], [b"X"])
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _free(names: list[str]) -> None:
    """Remove those of the segments that belong to this user and that no inspectable process holds."""
    segments = (SHARED_MEMORY / Path(name).name for name in names)
    ours = [path for path in segments if path.is_file() and path.stat().st_uid == os.getuid()]
    if ours:
        held = set().union(*(_held(int(name)) for name in os.listdir("/proc") if name.isdecimal()))  # noqa: PTH208
        for path in ours:
            if path.name not in held:
                path.unlink(missing_ok=True)


def _held(pid: int) -> set[str]:
    """Names of the shared memory segments that a process has mapped or opened."""
    place = Path(f"/proc/{pid}")
    names = []
    with contextlib.suppress(OSError):
        names += [line.split(maxsplit=5)[-1] for line in (place / "maps").read_text().splitlines()]
        names += [str(link.readlink()) for link in (place / "fd").iterdir()]
    return {Path(name).name for name in names if name.startswith(f"{SHARED_MEMORY}/")}


def _is_ours(path: Path) -> bool:
    """Whether it is a directory of this user; anyone can create one with such a name."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _is_locked(path: Path) -> bool:
    """Whether a process, possibly of another container, holds the directory's lock."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(handle)
    return False
