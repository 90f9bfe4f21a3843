"""Process that confines itself and then runs untrusted code.

Started by `rlctl.reward.sandbox.run_program` as `python -I jail.py LINE [PEER]`; the arguments are sockets.
It does not inherit the environment, and needs only the standard library, not `rlctl`.

Messages on LINE are JSON objects, one per line. The process receives its settings, and sends `ready` once it
is confined, or `refused` with the reason. Only then it receives the job, so a program cannot change this
answer. What the process sends afterwards depends on its role:

- `script`: nothing, the program runs as a script;
- `values`: the value of every `eval` step after the program;
- `program`: nothing, test code in another process uses the program over the socket PEER;
- `tests`: `passed` if the test code ran without an exception;
- `session`: for every further message with a source, what it printed, with the value of a last expression.
"""

from __future__ import annotations

import _thread
import ast
import builtins
import contextlib
import importlib
import io
import json
import math
import os
import platform
import sys
import traceback
from collections.abc import Iterable
from numbers import Integral, Real
from types import ModuleType
from typing import Any, NoReturn

#: Maximum depth of calls, as in LiveCodeBench's harness.
RECURSION_LIMIT = 50_000
#: Integers of more bits are encoded as hexadecimal text, because Python reads no decimal one of 4300 digits.
MAX_BITS = 13_000
#: Floats with a smaller relative or absolute difference are equal.
TOLERANCE = 1e-9


def main(line_fd: int, peer_fd: int = -1) -> None:
    """Confines this process, then runs the job according to its role."""
    with os.fdopen(line_fd, "rb", closefd=False) as line:
        settings = json.loads(line.readline())
        try:
            peer = _confine(settings)
        except (OSError, ValueError) as error:
            _send(line_fd, {"refused": str(error)})
            os._exit(1)
        _send(line_fd, {"ready": True})
        if settings["role"] == "session":
            _prepare_interpreter(settings["memory_bytes"])
            _serve_session(line, line_fd)
        job = json.loads(line.readline())
    _prepare_interpreter(settings["memory_bytes"])
    role = settings["role"]
    if role == "tests":
        if _tests_pass(job["source"], job["prelude"], peer.Peer(peer_fd, guards_names=True)):
            _send(line_fd, {"passed": True})
        os._exit(0)
    # Only the role `script` runs the program as `__main__`; its script part does not run in the other roles.
    module = ModuleType("__main__" if role == "script" else "solution")
    sys.modules[module.__name__] = module
    sys.argv = ["solution.py"]
    exec(compile(job["prelude"], "prelude.py", "exec", dont_inherit=True), module.__dict__)
    known = dict(module.__dict__)
    exec(compile(job["source"], "solution.py", "exec", dont_inherit=True), module.__dict__)
    if role == "script":
        return  # ends like any script: exit status, exit handlers, threads
    if role == "program":
        names = {
            name: value
            for name, value in module.__dict__.items()
            if not name.startswith("__") and (name not in known or known[name] is not value)
        }
        modules = {name: one.__name__ for name, one in names.items() if isinstance(one, ModuleType)}
        tests = peer.Peer(peer_fd, guards_names=False)
        tests.send((modules, {name: value for name, value in names.items() if name not in modules}))
        tests.serve()
    for kind, source in job["steps"]:
        if kind == "exec":
            exec(compile(source, "tests.py", "exec", dont_inherit=True), module.__dict__)
        else:
            value = eval(compile(source, "tests.py", "eval", dont_inherit=True), module.__dict__)
            _send(line_fd, {"value": encode(value)})
    os._exit(0)


def _serve_session(line: Iterable[bytes], line_fd: int) -> NoReturn:
    """Runs one source after the other in the same names, until the other end of the line closes."""
    sys.modules["__main__"] = module = ModuleType("__main__")
    for message in line:
        job = json.loads(message)
        sys.stdout = sys.stderr = output = _Printed(job["most"])
        try:
            _run_in(module.__dict__, job["source"])
        except BaseException as error:
            output.write("".join(traceback.format_exception_only(error)))
        _send(line_fd, {"output": output.text})
    os._exit(0)


def _run_in(names: dict[str, Any], source: str) -> None:
    """Runs statements; prints the value of a last expression, as the interactive interpreter does."""
    tree = ast.parse(source, "<tool>")
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        del tree.body[-1]
    exec(compile(tree, "<tool>", "exec", dont_inherit=True), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<tool>", "eval", dont_inherit=True), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


class _Printed(io.TextIOBase):
    """The first `most` characters of what is printed, and a mark if there was more."""

    def __init__(self, most: int) -> None:
        self.text = ""
        self._left = most

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Keeps what there is place for."""
        if len(text) > self._left >= 0:
            self.text = f"{self.text}{text[: self._left]} … (cut)"
            self._left = -1
        elif self._left >= 0:
            self.text, self._left = self.text + text, self._left - len(text)
        return len(text)


def _prepare_interpreter(memory_bytes: int) -> None:
    """Sets what judges of programming problems set: deep recursion, integers of any number of digits.

    A thread's stack counts against the memory limit in full, so a program that asks for hundreds of MiB gets
    an eighth of the limit. Frames of Python functions are not on the stack.
    """
    sys.setrecursionlimit(RECURSION_LIMIT)
    sys.set_int_max_str_digits(0)
    set_size = _thread.stack_size
    _thread.stack_size = lambda size=0: set_size(min(size, memory_bytes // 8))
    if "threading" in sys.modules:
        sys.modules["threading"].stack_size = _thread.stack_size  # type: ignore[attr-defined]


def _tests_pass(source: str, prelude: str, peer: Any) -> bool:
    """Runs test code with the prelude's and the program's names in scope.

    Of the program's, those are left out that are built-in, or such as `__builtins__`.

    Exceptions of the test code propagate. Returns False if the program's process has ended.
    """
    modules, names = peer.receive()
    known: dict[str, Any] = {}
    exec(compile(prelude, "prelude.py", "exec", dont_inherit=True), known)
    for name, value in {**modules, **names}.items():
        if not name.startswith("__") and not hasattr(builtins, name):
            with contextlib.suppress(ImportError):
                known[name] = importlib.import_module(value) if name in modules else value
    known |= {"__name__": "tests", "_rlctl_same": lambda found, wanted: same(encode(found), encode(wanted))}
    exec(compile(source, "tests.py", "exec", dont_inherit=True), known)
    return not peer.is_lost


def same(found: Any, wanted: Any) -> bool:
    """Whether an encoded value (see `encode`) equals the wanted one.

    Floats may differ by `TOLERANCE`, absolute or relative; from an integer only absolute.
    """
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(found, int | float) and isinstance(wanted, float):
        with contextlib.suppress(OverflowError):  # an integer beyond the range of floats
            return math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(found, float) and isinstance(wanted, int) and math.isfinite(found):
        nearest = round(found)
        return nearest == wanted and abs(found - nearest) <= TOLERANCE
    return bool(found == wanted)


def encode(value: Any) -> Any:
    """Encodes a value as JSON that distinguishes lists, tuples, sets and dictionaries.

    Equal values of these types have equal codes. Any other object is encoded as the name of its type, which
    equals the code of no literal, so an object that claims to equal everything does not pass a test.
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
        number = int(value)
        return number if number.bit_length() <= MAX_BITS else ["int", hex(number)]
    if isinstance(value, Real):
        return float(value)
    return ["bytes", value.hex()] if isinstance(value, bytes) else ["object", type(value).__name__]


def _confine(settings: dict[str, Any]) -> Any:
    """Confines this process; returns the module `peer`, which cannot be imported afterwards."""
    # Imported from this directory, not as a package: `-I` keeps the directory off the path.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    import confine  # type: ignore[import-not-found]

    if settings["role"] in {"program", "tests"}:
        import peer  # type: ignore[import-not-found]
    else:
        peer = None

    del sys.path[0]
    confine.detach(platform.machine())
    if settings["has_landlock"]:
        confine.confine_files(os.getcwd())  # noqa: PTH109
    confine.limit_resources(memory_bytes=settings["memory_bytes"], cpu_s=settings["cpu_s"])
    confine.filter_system_calls(bytes.fromhex(settings["filter"]))
    return peer


def _send(fd: int, values: dict[str, Any]) -> None:
    data = json.dumps(values).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
