"""The filter of system calls, made from the table `system_calls.toml`."""

from __future__ import annotations

import errno
import platform
import struct
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

#: machine → AUDIT_ARCH_* (linux/audit.h)
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: System calls with this bit belong to x86_64's second set (x32), which would bypass the filter.
X32_BIT = 0x40000000

# Instructions of the classic BPF machine (linux/filter.h, linux/bpf_common.h).
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data: the call's number, the machine, the instruction pointer, six arguments of 8
# bytes, both machines little-endian.
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16

#: Half of an argument, mask, values; see `system_calls.toml`.
Test = tuple[int, int, list[int]]


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """The table for one machine. Calls that it does not have are left out.

    Attributes:
        numbers: call → its number.
        allowed: allowed for all arguments.
        allowed_if: call → alternatives of tests of its arguments.
        absent: fail with ENOSYS, as unknown calls do.
    """

    numbers: dict[str, int]
    allowed: list[str]
    allowed_if: dict[str, list[list[Test]]]
    absent: list[str]

    @property
    def denied(self) -> dict[str, int]:
        """Calls that fail for at least some arguments → number."""
        return {name: number for name, number in self.numbers.items() if name not in self.allowed}


def read_table() -> dict[str, Any]:
    """The content of `system_calls.toml`."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@lru_cache
def system_calls(*, has_landlock: bool, machine: str | None = None) -> SystemCalls:
    """The table for a machine, by default this one.

    Raises:
        OSError: the table does not contain this machine.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise OSError(f"rlctl has no system call filter for {machine}, only for {' and '.join(MACHINES)}")
    table = read_table()
    numbers = {
        name: int(first) + place
        for first, names in {**table["numbers"][machine], **table["numbers"]["both"]}.items()
        for place, name in enumerate(names.split())
        if name != "-"
    }

    def names_of(*groups: dict[str, str]) -> list[str]:
        return [
            name for group in groups for names in group.values() for name in names.split() if name in numbers
        ]

    conditions = table["allow_if"] | ({} if has_landlock else table["allow_if_without_landlock"])
    return SystemCalls(
        numbers,
        names_of(table["allow"], table["allow_with_landlock"] if has_landlock else {}),
        {name: tests for name, tests in conditions.items() if name in numbers},
        names_of(table["absent"]),
    )


def filter_program(calls: SystemCalls, machine: str | None = None) -> bytes:
    """The filter's instructions (8 bytes each, `struct sock_filter`) for the machine of the calls."""
    program = [
        _step(_LOAD, _MACHINE_AT),
        _step(_IF_EQUAL, MACHINES[machine or platform.machine()], then=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
    ]
    for name in calls.allowed:
        program += _if_call(calls.numbers[name], [_step(_RETURN, _ALLOW)])
    for name, alternatives in calls.allowed_if.items():
        tests = [step for alternative in alternatives for step in _if_all(alternative)]
        program += _if_call(calls.numbers[name], [*tests, _step(_RETURN, _DENY | errno.EPERM)])
    for name in calls.absent:
        program += _if_call(calls.numbers[name], [_step(_RETURN, _DENY | errno.ENOSYS)])
    # Numbers above the table, among them those of x32, are unknown.
    program += [
        _step(_IF_AT_LEAST, max(calls.numbers.values()) + 1, otherwise=1),
        _step(_RETURN, _DENY | errno.ENOSYS),
        _step(_RETURN, _DENY | errno.EPERM),
    ]
    return b"".join(program)


def _if_call(number: int, then: list[bytes]) -> list[bytes]:
    return [_step(_IF_EQUAL, number, otherwise=len(then)), *then]


def _if_all(tests: list[Test]) -> list[bytes]:
    """Instructions that allow the call if all tests hold, and fall through otherwise."""
    program = [_step(_RETURN, _ALLOW)]
    for half, mask, values in reversed(tests):
        *others, last = values
        compare = [_step(_IF_EQUAL, last, otherwise=len(program))]
        for value in reversed(others):
            compare.insert(0, _step(_IF_EQUAL, value, then=len(compare)))
        program = [_step(_LOAD, _ARGUMENTS_AT + 4 * half), _step(_AND, mask), *compare, *program]
    return program


def _step(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; `then` and `otherwise` are the numbers of instructions to skip after a test."""
    return struct.pack("=HBBI", code, then, otherwise, value)
