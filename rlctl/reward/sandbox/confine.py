"""Restricts what this process can do to the machine. Linux and standard library only.

Every function raises `OSError` if the kernel refuses. Landlock restricts files, and the filter that
`system_calls.py` makes restricts everything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys

MAX_FILE_BYTES = 16 << 20
MAX_OPEN_FILES = 64
#: Of the main thread; the kernel leaves 128 MiB for it. Calls through C (cached functions) need it.
STACK_BYTES = 96 << 20

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER, _SIGKILL = 2, 9
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522
#: System call numbers, the same on every architecture: create a ruleset, add a rule, apply the ruleset.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH, _O_PATH = 1, 1, 0o10000000

# Landlock's rights (linux/landlock.h).
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_FILE, _TRUNCATE = (
    1 << bit for bit in (1, 2, 3, 5, 8, 14)
)
READ = _READ_FILE | _READ_DIR
CHANGE = READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_FILE | _TRUNCATE
_ON_FILES = _READ_FILE | _WRITE_FILE | _TRUNCATE
#: Landlock version → number of rights on files that it supports (rights of later versions are not used).
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_MAX_RIGHTS = 16
#: First Landlock version, and bits, of: rights on TCP ports, of which none is given; scopes that the process
#: cannot leave, abstract Unix sockets and signals.
_TCP_RIGHTS, _SCOPES = (4, 0b11), (6, 0b11)

#: Readable, in addition to Python itself: shared libraries, time zones, random numbers.
SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
)

_libc = ctypes.CDLL(None, use_errno=True)


def limit_resources(*, memory_bytes: int, cpu_s: int) -> None:
    """Limits memory, processor time, file size and open files; disables core dumps."""
    for what, bound in {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }.items():
        _, hard = resource.getrlimit(what)
        value = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(what, (value, value))
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != resource.RLIM_INFINITY and soft < STACK_BYTES:
        stack = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))


def detach(machine: str) -> None:
    """Drops what the process could use against others, or others against it, without any system call.

    It ends with the process (or thread) that started it, is the first that the kernel ends when memory is
    short, has no capabilities of root, cannot gain any, and others cannot read its memory.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")
    for option, value in (
        (_PR_SET_PDEATHSIG, _SIGKILL),
        (_PR_SET_NO_NEW_PRIVS, 1),
        (_PR_SET_DUMPABLE, 0),
    ):
        _checked(_libc.prctl(option, value, 0, 0, 0), f"prctl({option})")
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    nothing = bytes(24)
    _checked(_libc.syscall(_CAPSET[machine], header, nothing), "capset")


def landlock_version() -> int:
    """Landlock version of the kernel; 0 without Landlock (before 5.13, or disabled)."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)))


def confine_files(changeable: str) -> None:
    """Restricts file access with Landlock: Python and system libraries readable, one directory writable.

    All other files are inaccessible, except /dev/null, /dev/stdin and /dev/stdout. The process cannot create
    directories or links in the directory, so it is easy to remove.
    """
    version = landlock_version()
    rights = (1 << _NUM_RIGHTS.get(version, _MAX_RIGHTS)) - 1
    others = [bits if version >= first else 0 for first, bits in (_TCP_RIGHTS, _SCOPES)]
    # The kernel accepts a structure that is longer than its own if the rest is 0.
    rules = _checked(
        _libc.syscall(_LANDLOCK_CREATE, struct.pack("=QQQ", rights, *others), 24, 0),
        "landlock_create_ruleset",
    )
    for path in {sys.prefix, sys.base_prefix, sys.base_exec_prefix, *SYSTEM, "/dev/stdin"}:
        _allow(rules, path, READ & rights)
    for path in (os.devnull, "/dev/stdout"):
        _allow(rules, path, (READ | _WRITE_FILE | _TRUNCATE) & rights)
    _allow(rules, changeable, CHANGE & rights)
    _checked(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, _O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rights &= ~0 if os.path.isdir(path) else _ON_FILES  # noqa: PTH112
    rule = struct.pack("=Qi", rights, place)
    _checked(
        _libc.syscall(_LANDLOCK_ADD, rules, _LANDLOCK_PATH_BENEATH, rule, 0), f"landlock_add_rule({path})"
    )
    os.close(place)


def filter_system_calls(program: bytes) -> None:
    """Installs a seccomp filter, which cannot be removed."""
    instructions = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    described = Program(len(program) // 8, ctypes.addressof(instructions))
    _checked(
        _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(described), 0, 0),
        "prctl(PR_SET_SECCOMP)",
    )


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
