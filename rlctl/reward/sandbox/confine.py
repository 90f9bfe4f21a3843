"""Restricts what this process can do to the machine. Linux and standard library only.

Every function raises `OSError` if the kernel refuses.

The seccomp filter denies sockets, new processes and programs, operations on other processes, changes of file
attributes, and memory outside the process. Threads are allowed. Without Landlock, which restricts files, it
can also deny all changes of files.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from dataclasses import dataclass

MAX_FILE_BYTES = 16 << 20
MAX_OPEN_FILES = 64

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
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
#: Landlock version → number of rights that it supports (rights of later versions are not used).
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15}

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


def die_with_parent() -> None:
    """Requests that the kernel kills this process when the process (or thread) that started it ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def drop_privileges(machine: str) -> None:
    """Prevents executed programs from gaining privileges, and drops all capabilities of root."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    header, nothing = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _checked(_libc.syscall(_CAPSET[machine], header, nothing), "capset")


def landlock_version() -> int:
    """Landlock version of the kernel; 0 without Landlock (before 5.13, or disabled)."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)))


def confine_files(changeable: str) -> None:
    """Restricts file access with Landlock: Python and system libraries readable, one directory writable.

    All other files are inaccessible, except /dev/null. The process cannot create directories or links in the
    directory, so it is easy to remove.
    """
    rights = (1 << _NUM_RIGHTS.get(landlock_version(), 15)) - 1
    rules = _checked(
        _libc.syscall(_LANDLOCK_CREATE, struct.pack("=Q", rights), 8, 0), "landlock_create_ruleset"
    )
    for path in {sys.prefix, sys.base_prefix, sys.base_exec_prefix, *SYSTEM}:
        _allow(rules, path, READ & rights)
    _allow(rules, os.devnull, (READ | _WRITE_FILE | _TRUNCATE) & rights)
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


#: machine → (index in the tables below, AUDIT_ARCH_*)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
#: System calls with this bit belong to x86_64's second set (x32), which would bypass the filter.
X32_BIT = 0x40000000

CLONE_THREAD = 0x00010000
PR_SET_NAME = 15
WRITING = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, the same on both machines
ANY_BIT = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SeccompRule:
    """Denies a system call, always or for some values of one argument."""

    numbers: tuple[int | None, int | None]  # on x86_64 and aarch64; None where it does not exist
    argument: int | None = None  # index of the argument to test; None: deny always
    mask: int = 0  # bits to test (of the argument's lower 32 bits)
    if_set: bool = True  # deny if one of them is set; False: if none is
    only: int | None = None  # deny unless the lower 32 bits equal this; `mask` is not used
    error: int = errno.EPERM  # errno of the denied call


ALWAYS = {
    # network; io_uring opens sockets without the system call `socket`
    "socket": SeccompRule((41, 198)),
    "io_uring_setup": SeccompRule((425, 425)),
    # processes and programs; filters cannot read the flags of clone3, and glibc falls back to clone
    "fork": SeccompRule((57, None)),
    "vfork": SeccompRule((58, None)),
    "clone": SeccompRule((56, 220), 0, CLONE_THREAD, if_set=False),
    "clone3": SeccompRule((435, 435), error=errno.ENOSYS),
    "execve": SeccompRule((59, 221)),
    "execveat": SeccompRule((322, 281)),
    "unshare": SeccompRule((272, 97)),
    "setns": SeccompRule((308, 268)),
    # other processes
    "kill": SeccompRule((62, 129)),
    "tkill": SeccompRule((200, 130)),
    "tgkill": SeccompRule((234, 131)),
    "rt_sigqueueinfo": SeccompRule((129, 138)),
    "rt_tgsigqueueinfo": SeccompRule((297, 240)),
    "pidfd_send_signal": SeccompRule((424, 424)),
    "pidfd_open": SeccompRule((434, 434)),
    "pidfd_getfd": SeccompRule((438, 438)),
    "ptrace": SeccompRule((101, 117)),
    "process_vm_readv": SeccompRule((310, 270)),
    "process_vm_writev": SeccompRule((311, 271)),
    # a process may only set its name, not, for example, the signal that it gets when its parent ends
    "prctl": SeccompRule((157, 167), 0, only=PR_SET_NAME),
    "prlimit64": SeccompRule((302, 261), 0, ANY_BIT),
    "setpriority": SeccompRule((141, 140)),
    "sched_setaffinity": SeccompRule((203, 122)),
    "sched_setscheduler": SeccompRule((144, 119)),
    "sched_setparam": SeccompRule((142, 118)),
    "sched_setattr": SeccompRule((314, 274)),
    "ioprio_set": SeccompRule((251, 30)),
    # attributes of files, which Landlock does not restrict
    "truncate": SeccompRule((76, 45)),
    "chmod": SeccompRule((90, None)),
    "fchmod": SeccompRule((91, 52)),
    "fchmodat": SeccompRule((268, 53)),
    "fchmodat2": SeccompRule((452, 452)),
    "chown": SeccompRule((92, None)),
    "lchown": SeccompRule((94, None)),
    "fchown": SeccompRule((93, 55)),
    "fchownat": SeccompRule((260, 54)),
    "utime": SeccompRule((132, None)),
    "utimes": SeccompRule((235, None)),
    "futimesat": SeccompRule((261, None)),
    "utimensat": SeccompRule((280, 88)),
    "setxattr": SeccompRule((188, 5)),
    "lsetxattr": SeccompRule((189, 6)),
    "fsetxattr": SeccompRule((190, 7)),
    "setxattrat": SeccompRule((463, 463)),
    "removexattr": SeccompRule((197, 14)),
    "lremovexattr": SeccompRule((198, 15)),
    "fremovexattr": SeccompRule((199, 16)),
    "removexattrat": SeccompRule((466, 466)),
    # memory and objects that outlive the process or escape its limit
    "shmget": SeccompRule((29, 194)),
    "semget": SeccompRule((64, 190)),
    "msgget": SeccompRule((68, 186)),
    "mq_open": SeccompRule((240, 180)),
    "memfd_create": SeccompRule((319, 279)),
    # kernel facilities
    "bpf": SeccompRule((321, 280)),
    "perf_event_open": SeccompRule((298, 241)),
    "userfaultfd": SeccompRule((323, 282)),
    "keyctl": SeccompRule((250, 219)),
    "add_key": SeccompRule((248, 217)),
    "request_key": SeccompRule((249, 218)),
}

FILE_CHANGES = {
    "open": SeccompRule((2, None), 1, WRITING),
    "openat": SeccompRule((257, 56), 2, WRITING),
    "openat2": SeccompRule((437, 437), error=errno.ENOSYS),
    "creat": SeccompRule((85, None)),
    "unlink": SeccompRule((87, None)),
    "unlinkat": SeccompRule((263, 35)),
    "rename": SeccompRule((82, None)),
    "renameat": SeccompRule((264, 38)),
    "renameat2": SeccompRule((316, 276)),
    "mkdir": SeccompRule((83, None)),
    "mkdirat": SeccompRule((258, 34)),
    "rmdir": SeccompRule((84, None)),
    "link": SeccompRule((86, None)),
    "linkat": SeccompRule((265, 37)),
    "symlink": SeccompRule((88, None)),
    "symlinkat": SeccompRule((266, 36)),
    "mknod": SeccompRule((133, None)),
    "mknodat": SeccompRule((259, 33)),
}

# Instructions of the classic BPF machine (linux/filter.h, linux/bpf_common.h).
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data: the call's number, the machine, the instruction pointer, six arguments of 8
# bytes.
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16


def filter_program(*, deny_file_changes: bool, machine: str | None = None) -> bytes:
    """The filter's instructions (8 bytes each, `struct sock_filter`), for this machine.

    Raises:
        OSError: the tables do not contain this machine.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise OSError(f"rlctl has no system call filter for {machine}, only for {' and '.join(MACHINES)}")
    place, audit_arch = MACHINES[machine]
    rules = [*ALWAYS.values(), *(FILE_CHANGES.values() if deny_file_changes else ())]
    program = [
        _step(_LOAD, _MACHINE_AT),
        _step(_IF_EQUAL, audit_arch, then=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        _step(_IF_AT_LEAST, X32_BIT, otherwise=1),
        _step(_RETURN, _DENY | errno.ENOSYS),
    ]
    for rule in rules:
        number = rule.numbers[place]
        if number is not None:
            program += _denial(rule, number)
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _denial(rule: SeccompRule, number: int) -> list[bytes]:
    """Instructions that return a decision for this call, and fall through for any other."""
    deny = _step(_RETURN, _DENY | rule.error)
    if rule.argument is None:
        return [_step(_IF_EQUAL, number, otherwise=1), deny]
    if rule.only is not None:
        test = _step(_IF_EQUAL, rule.only, then=1)
    else:
        test = _step(_IF_BITS, rule.mask, otherwise=1) if rule.if_set else _step(_IF_BITS, rule.mask, then=1)
    load = _step(_LOAD, _ARGUMENTS_AT + 8 * rule.argument)  # the lower half: both machines are little-endian
    return [_step(_IF_EQUAL, number, otherwise=4), load, test, deny, _step(_RETURN, _ALLOW)]


def _step(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; `then` and `otherwise` are the numbers of instructions to skip after a test."""
    return struct.pack("=HBBI", code, then, otherwise, value)
