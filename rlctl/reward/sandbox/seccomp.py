"""What a jailed program may not ask of the kernel: a seccomp filter, as bytes. Standard library only.

It denies sockets, new processes and programs, anything done to other processes, changes of file
attributes, and memory outside the process. Threads are allowed. Where nothing else guards the files
(no Landlock), it can deny every change to them too.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

#: machine → (place in the tables below, AUDIT_ARCH_*)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
#: System calls numbered from here on are x86_64's second set (x32), which would go past the filter.
X32_BIT = 0x40000000

CLONE_THREAD = 0x00010000
WRITING = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, alike on both machines
ANY_BIT = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Rule:
    """Deny a system call, always or for some values of one argument.

    Attributes:
        numbers: on x86_64 and aarch64; None where it does not exist.
        argument: place of the argument looked at; None: deny always.
        mask: bits of it (of its lower half).
        if_set: deny when one of them is set; False: when none is.
        error: what the caller is told.
    """

    numbers: tuple[int | None, int | None]
    argument: int | None = None
    mask: int = 0
    if_set: bool = True
    error: int = errno.EPERM


ALWAYS = {
    # network; io_uring opens sockets without the system call
    "socket": Rule((41, 198)),
    "io_uring_setup": Rule((425, 425)),
    # processes and programs; clone3 hides its flags from filters, glibc falls back to clone
    "fork": Rule((57, None)),
    "vfork": Rule((58, None)),
    "clone": Rule((56, 220), 0, CLONE_THREAD, if_set=False),
    "clone3": Rule((435, 435), error=errno.ENOSYS),
    "execve": Rule((59, 221)),
    "execveat": Rule((322, 281)),
    "unshare": Rule((272, 97)),
    "setns": Rule((308, 268)),
    # other processes
    "kill": Rule((62, 129)),
    "tkill": Rule((200, 130)),
    "tgkill": Rule((234, 131)),
    "rt_sigqueueinfo": Rule((129, 138)),
    "rt_tgsigqueueinfo": Rule((297, 240)),
    "pidfd_send_signal": Rule((424, 424)),
    "pidfd_open": Rule((434, 434)),
    "pidfd_getfd": Rule((438, 438)),
    "ptrace": Rule((101, 117)),
    "process_vm_readv": Rule((310, 270)),
    "process_vm_writev": Rule((311, 271)),
    "prlimit64": Rule((302, 261), 0, ANY_BIT),
    "setpriority": Rule((141, 140)),
    "sched_setaffinity": Rule((203, 122)),
    "sched_setscheduler": Rule((144, 119)),
    "sched_setparam": Rule((142, 118)),
    "sched_setattr": Rule((314, 274)),
    "ioprio_set": Rule((251, 30)),
    # attributes of files, which Landlock does not guard
    "truncate": Rule((76, 45)),
    "chmod": Rule((90, None)),
    "fchmod": Rule((91, 52)),
    "fchmodat": Rule((268, 53)),
    "fchmodat2": Rule((452, 452)),
    "chown": Rule((92, None)),
    "lchown": Rule((94, None)),
    "fchown": Rule((93, 55)),
    "fchownat": Rule((260, 54)),
    "utime": Rule((132, None)),
    "utimes": Rule((235, None)),
    "futimesat": Rule((261, None)),
    "utimensat": Rule((280, 88)),
    "setxattr": Rule((188, 5)),
    "lsetxattr": Rule((189, 6)),
    "fsetxattr": Rule((190, 7)),
    "setxattrat": Rule((463, 463)),
    "removexattr": Rule((197, 14)),
    "lremovexattr": Rule((198, 15)),
    "fremovexattr": Rule((199, 16)),
    "removexattrat": Rule((466, 466)),
    # memory and objects that outlive the process or escape its limit
    "shmget": Rule((29, 194)),
    "semget": Rule((64, 190)),
    "msgget": Rule((68, 186)),
    "mq_open": Rule((240, 180)),
    "memfd_create": Rule((319, 279)),
    # the kernel's own machinery
    "bpf": Rule((321, 280)),
    "perf_event_open": Rule((298, 241)),
    "userfaultfd": Rule((323, 282)),
    "keyctl": Rule((250, 219)),
    "add_key": Rule((248, 217)),
    "request_key": Rule((249, 218)),
}

FILE_CHANGES = {
    "open": Rule((2, None), 1, WRITING),
    "openat": Rule((257, 56), 2, WRITING),
    "openat2": Rule((437, 437), error=errno.ENOSYS),
    "creat": Rule((85, None)),
    "unlink": Rule((87, None)),
    "unlinkat": Rule((263, 35)),
    "rename": Rule((82, None)),
    "renameat": Rule((264, 38)),
    "renameat2": Rule((316, 276)),
    "mkdir": Rule((83, None)),
    "mkdirat": Rule((258, 34)),
    "rmdir": Rule((84, None)),
    "link": Rule((86, None)),
    "linkat": Rule((265, 37)),
    "symlink": Rule((88, None)),
    "symlinkat": Rule((266, 36)),
    "mknod": Rule((133, None)),
    "mknodat": Rule((259, 33)),
}

# Instructions of the classic BPF machine (linux/filter.h, linux/bpf_common.h).
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
# struct seccomp_data: the call's number, the machine, the instruction pointer, six arguments of 8 bytes.
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16


def filter_program(*, deny_file_changes: bool, machine: str | None = None) -> bytes:
    """The filter's instructions (8 bytes each, `struct sock_filter`), for this machine.

    Raises:
        OSError: the system calls of this machine are not known here.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise OSError(f"no system call filter is known for {machine}, only for {' and '.join(MACHINES)}")
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


def _denial(rule: Rule, number: int) -> list[bytes]:
    """Steps that return for this call, and fall through for any other."""
    deny = _step(_RETURN, _DENY | rule.error)
    if rule.argument is None:
        return [_step(_IF_EQUAL, number, otherwise=1), deny]
    test = _step(_IF_BITS, rule.mask, otherwise=1) if rule.if_set else _step(_IF_BITS, rule.mask, then=1)
    load = _step(_LOAD, _ARGUMENTS_AT + 8 * rule.argument)  # the lower half: both machines are little-endian
    return [_step(_IF_EQUAL, number, otherwise=4), load, test, deny, _step(_RETURN, _ALLOW)]


def _step(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; `then` and `otherwise` are how many of the next ones are skipped."""
    return struct.pack("=HBBI", code, then, otherwise, value)
