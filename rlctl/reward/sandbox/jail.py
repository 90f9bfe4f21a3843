"""A process that confines itself and then runs one program it does not trust.

Started by `rlctl.reward.sandbox.run` as `python -I jail.py JOB REPLY`, two file descriptors; it sees no
environment, and neither `rlctl` nor anything beyond the standard library is needed.

The job is one JSON object; `run_program` describes its parts. The reply is JSON, line by line: `ready`
or why not, then the value of every `eval` step, then the job's token when all steps went through.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from numbers import Integral, Real
from types import ModuleType
from typing import Any


def main(job_fd: int, reply_fd: int) -> None:
    """Confine this process, run the program, take the steps."""
    with os.fdopen(job_fd, "rb") as file:
        job = json.load(file)
    try:
        _confine(job)
    except (OSError, ValueError) as error:
        _send(reply_fd, {"refused": str(error)})
        os._exit(1)
    _send(reply_fd, {"ready": True})
    steps, token = job["steps"], job["token"]
    # A program that is asked for functions is a module: what it does when run as a script is its own affair.
    module = ModuleType("solution" if steps else "__main__")
    sys.modules[module.__name__] = module
    sys.argv = ["solution.py"]
    exec(compile(job["program"], "solution.py", "exec", dont_inherit=True), module.__dict__)
    if not steps:
        return  # ends like any script: exit status, exit handlers, threads
    for kind, source in steps:
        if kind == "exec":
            exec(compile(source, "tests.py", "exec", dont_inherit=True), module.__dict__)
        else:
            value = eval(compile(source, "tests.py", "eval", dont_inherit=True), module.__dict__)
            _send(reply_fd, {"value": encode(value)})
    _send(reply_fd, {"token": token})
    os._exit(0)


def encode(value: Any) -> Any:
    """The value as JSON that tells lists, tuples, sets and dictionaries apart.

    Equal values of these types have equal codes; of anything else only the type's name is left, which
    equals no value. So an object cannot pass for another by saying that it equals it.
    """
    if getattr(value, "ndim", None) == 0:  # a scalar of NumPy
        value = value.item()
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", *map(encode, value)]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(map(encode, value), key=json.dumps)]
    if isinstance(value, dict):
        pairs = ([encode(key), encode(item)] for key, item in value.items())
        return ["dict", *sorted(pairs, key=lambda pair: json.dumps(pair[0]))]
    return _encode_scalar(value)


def _encode_scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return ["bytes", value.hex()] if isinstance(value, bytes) else ["object", type(value).__name__]


def _confine(job: dict[str, Any]) -> None:
    # Imported from here, not the package: `-I` keeps this directory off the path.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import confine  # type: ignore[import-not-found]
    import seccomp  # type: ignore[import-not-found]

    del sys.path[0]
    confine.die_with_parent()
    has_landlock = confine.landlock_version() > 0
    program = seccomp.filter_program(deny_file_changes=not has_landlock)
    confine.drop_privileges(platform.machine())
    if has_landlock:
        confine.confine_files(os.getcwd())  # noqa: PTH109
    confine.limit_resources(memory_bytes=job["memory_bytes"], cpu_s=job["cpu_s"])
    confine.filter_system_calls(program)


def _send(fd: int, values: dict[str, Any]) -> None:
    os.write(fd, json.dumps(values).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
