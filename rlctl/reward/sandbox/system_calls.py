"""The filter of system calls, made from the table `system_calls.toml`."""

from __future__ import annotations

import errno
import platform
import struct
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

#: machine → AUDIT_ARCH_* (linux/audit.h)
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Instructions of the classic BPF machine (linux/filter.h, linux/bpf_common.h).
_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data: the call's number, the machine, the instruction pointer, six arguments of 8
# bytes, both machines little-endian.
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16

#: Half of an argument, mask, values; see `system_calls.toml`.
Test = tuple[int, int, list[int]]


@dataclass(frozen=True, slots=True)
class SeccompRule:
    """When a system call is allowed, and how it fails otherwise."""

    number: int
    allowed_if: list[list[Test]]  # alternatives of tests that must all hold: [[]] is always, [] is never
    error: int  # errno


def read_table() -> dict[str, Any]:
    """The content of `system_calls.toml`."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@lru_cache
def rules_of(*, has_landlock: bool, machine: str | None = None) -> dict[str, SeccompRule]:
    """System call → its rule, for the calls of a machine, by default this one.

    Raises:
        OSError: the table does not contain this machine.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise OSError(f"rlctl has no system call filter for {machine}, only for {' and '.join(MACHINES)}")
    table = read_table()
    allowed_if: dict[str, list[list[Test]]] = table["allow_if"]
    if not has_landlock:
        allowed_if |= table["allow_if_without_landlock"]
    for group in ("allow", "allow_with_landlock") if has_landlock else ("allow",):
        allowed_if |= {name: [[]] for name in " ".join(table[group].values()).split()}
    absent = " ".join(table["absent"].values()).split()
    return {
        name: SeccompRule(
            int(first) + index, allowed_if.get(name, []), errno.ENOSYS if name in absent else errno.EPERM
        )
        for first, names in {**table["numbers"][machine], **table["numbers"]["both"]}.items()
        for index, name in enumerate(names.split())
        if name != "-"
    }


def filter_program(rules: Iterable[SeccompRule], machine: str | None = None) -> bytes:
    """The filter's instructions (8 bytes each, `struct sock_filter`) for the machine of the rules."""
    program = [
        _step(_LOAD, _MACHINE_AT),
        _step(_IF_EQUAL, MACHINES[machine or platform.machine()], then=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
    ]
    for rule in rules:
        then = [step for tests in rule.allowed_if for step in _if_all(tests)]
        if [] not in rule.allowed_if:
            then.append(_step(_RETURN, _DENY | rule.error))
        program += [_step(_IF_EQUAL, rule.number, otherwise=len(then)), *then]
    # Unknown calls, among them x86_64's second set (x32), whose numbers have bit 30.
    return b"".join([*program, _step(_RETURN, _DENY | errno.ENOSYS)])


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
