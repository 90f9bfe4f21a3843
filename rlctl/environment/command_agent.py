"""Runs a command line as an agent, in a worker process: any program that speaks one of the APIs.

Its environment has OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY; it reads the
task as JSON on standard input. If the last line that it prints is a number, that is its reward. Imports
little, because the process that forks workers imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: What is kept of the end of an output, in bytes; seconds in which it arrives after the program has ended.
_KEPT, _ARRIVES_S = 1 << 16, 1.0
#: Seconds between looks whether it has ended, where the kernel does not tell.
_LOOK_S = 0.05
#: Exit codes that are no outcome of the policy: a service is missing (sysexits), no program was started.
_FAULTS = {69: "a service is unavailable", 75: "a temporary failure", 126: "not executable", 127: "not found"}


class CommandFailed(Exception):
    """The program failed for a reason that the policy did not cause."""


async def run(
    task: Mapping[str, Any], base_url: str, root_url: str, api_key: str, command: Sequence[str]
) -> float | None:
    """The reward that the program prints; None: it prints none.

    Raises:
        CommandFailed: it cannot be started, was ended by a signal, or says that a service failed.
        ValueError: it ended with another exit code than 0.
    """
    variables = {"OPENAI_BASE_URL": base_url, "ANTHROPIC_BASE_URL": root_url}
    variables |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), api_key)
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, **variables}
        )
    except OSError as error:
        raise CommandFailed(f"{command[0]}: {error.strerror}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output = bytearray()
    errors = bytearray()
    transfers = [
        asyncio.ensure_future(_write(process.stdin, json.dumps(task, default=str).encode())),
        asyncio.ensure_future(_keep_end(process.stdout, output)),
        asyncio.ensure_future(_keep_end(process.stderr, errors)),
    ]
    code = await _exit_code(process)
    await asyncio.wait(transfers, timeout=_ARRIVES_S)  # what it started may keep its output open
    for transfer in transfers:
        transfer.cancel()
    said = _last_line(errors).replace(api_key, "…")
    if code < 0 or code in _FAULTS:
        raise CommandFailed(f"exit code {code} ({_FAULTS.get(code, 'ended by a signal')}): {said}")
    if code:
        raise ValueError(f"exit code {code}: {said}")
    with contextlib.suppress(ValueError):
        return float(_last_line(output))
    return None


async def _exit_code(process: asyncio.subprocess.Process) -> int:
    """Waits for the end of the program alone: asyncio's own `wait` waits for whoever has its output, too."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError), _closing(os.pidfd_open(process.pid)) as handle:
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
    while process.returncode is None:
        await asyncio.sleep(0.001 if ended.is_set() else _LOOK_S)
    return process.returncode


@contextlib.contextmanager
def _closing(handle: int) -> Iterator[int]:
    try:
        yield handle
    finally:
        os.close(handle)


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it does not read
        stream.write(data)
        await stream.drain()
    stream.close()


async def _keep_end(stream: asyncio.StreamReader, end: bytearray) -> None:
    while part := await stream.read(_KEPT):
        end += part
        del end[:-_KEPT]


def _last_line(output: bytearray) -> str:
    """The last line that is not blank."""
    lines = output.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
