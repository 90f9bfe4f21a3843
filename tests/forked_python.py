"""`python`, `rlctl` and `torchrun` that start as forks, for processes of shells and launchers.

Each command of `commands` is a small client. It sends its arguments, directory, environment and file
descriptors to a server that has already imported the libraries of a run. A fork of the server runs the
arguments like Python. The client forwards signals and exits like the fork. `sys.executable` is the client, so
launchers also start forks.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.processes import ROOT, TIMEOUT_S, Job

_CLIENT = """#!{python} -ISs
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
numbers = []
for number in sorted(map(int, os.listdir("/proc/self/fd"))):
    try:
        numbers += [number] * (number < 3 or os.get_inheritable(number))
    except OSError:  # that of the listing
        pass
request = {{"command": {command!r}, "words": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
encoded = json.dumps(request | {{"numbers": numbers, "parent": os.getppid()}}).encode()
socket.send_fds(server, [len(encoded).to_bytes(8)], numbers)
server.sendall(encoded)
lines = server.makefile()
pid = int(lines.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(lines.readline() or 137)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
#: Command → Python arguments before its own arguments.
_COMMANDS = {
    "python": (),
    "rlctl": ("-m", "rlctl"),
    "torchrun": ("-m", "torch.distributed.run"),
}


@contextmanager
def commands(before: Callable[[], None] | None = None) -> Iterator[Path]:
    """Yields a directory with the commands, to be prepended to `PATH`; the server calls `before`."""
    with tempfile.TemporaryDirectory(prefix="rlctl-python-") as name:
        directory = Path(name)
        address = str(directory / "socket")
        for command in _COMMANDS:
            client = _CLIENT.format(python=sys.executable, address=address, command=command)
            (directory / command).write_text(client)
            (directory / command).chmod(0o755)
        job = Job(_serve, str(directory), log=directory / "log", before=before)
        job.wait_for(lambda: Path(address).exists())
        try:
            yield directory
        finally:
            job.end()


def run_in(directory: Path, function: Callable[..., int], *arguments: Path, log: Path) -> None:
    """Calls `function(*arguments)`, paths as str, in a fork of the directory's server; it must return 0."""
    code = f"import sys; from {function.__module__} import {function.__name__} as function"
    command = [directory / "python", "-c", f"{code}; sys.exit(function(*sys.argv[1:]))", *arguments]
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, log.read_text()[-4000:]


def _serve(directory: str) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the children that run `_attend` are reaped automatically
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{directory}/starting")
        server.listen(64)
        Path(directory, "starting").rename(f"{directory}/socket")
        while True:
            client, _ = server.accept()
            if os.fork() == 0:
                server.close()
                os._exit(_attend(client, directory))
            client.close()


def _attend(client: socket.socket, directory: str) -> int:
    """Serves one command; kills it if its client ends first, because clients cannot forward SIGKILL."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    length, files, _, _ = socket.recv_fds(client, 8, 64)
    request = b""
    while len(request) < int.from_bytes(length):
        request += client.recv(2**20)
    pid = os.fork()
    if pid == 0:
        client.close()
        _become(json.loads(request), files, directory)
    client.sendall(b"%d\n" % pid)
    ended = os.pidfd_open(pid)
    if client in select.select([ended, client], [], [])[0]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    return 0


def _become(request: dict, files: list[int], directory: str) -> None:
    """Runs `python WORDS` in this process; never returns."""
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]  # beyond all that are assigned
    for file in files:
        os.close(file)
    for copy, number in zip(copies, request["numbers"], strict=True):
        os.dup2(copy, number)
        os.close(copy)
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):  # the kind of file can have changed
        stream = open(descriptor, "w" if descriptor else "r", closefd=False)  # noqa: SIM115
        if descriptor:
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(request["env"])
    me, actual = os.getpid(), os.getppid
    os.getppid = lambda: request["parent"] if os.getpid() == me else actual()
    os.chdir(request["cwd"])
    if request["words"][:1] == ["-I"]:  # isolated, as processes of the sandbox, which limit their memory
        os.execv(sys.executable, [sys.executable, *request["words"]])
    sys.executable = f"{directory}/python"
    multiprocessing.set_executable(sys.executable)
    words = [*_COMMANDS[request["command"]], *request["words"]]
    options = list(itertools.takewhile({"-u", "-P", "-B"}.__contains__, words))
    kind, *words = words[len(options) :]
    if kind.startswith("-m") and kind[2:]:
        kind, words = "-m", [kind[2:], *words]
    sys.path[:] = [entry for entry in sys.path if entry not in {"", str(ROOT)}]
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in os.environ else []
    try:
        if kind == "-c":
            sys.argv = ["-c", *words[1:]]
            exec(words[0], {"__name__": "__main__"})
        elif kind == "-m":
            sys.path[:0] = [] if "-P" in options else [str(Path.cwd())]
            sys.argv = words
            if not hasattr(sys.modules.get(words[0]), "__path__"):  # runpy warns about imported modules
                sys.modules.pop(words[0], None)
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(kind).parent))
            sys.argv = [kind, *words]
            runpy.run_path(kind, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
