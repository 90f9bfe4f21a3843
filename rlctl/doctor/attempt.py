"""Calls a function in a separate process, so that a crash or a hang becomes a line of the report.

The child runs `python -m rlctl.doctor.attempt MODULE:FUNCTION FILE`: it calls the function and writes the
outcome to the file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import rlctl
from rlctl.errors import RlctlError
from rlctl.leftovers import temporary_directory

#: Environment variables set by launchers; with them the child would wait for other ranks.
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Maximum characters shown of an error.
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """Outcome of a trial."""

    works: bool  # whether it succeeded
    found: str  # its result, or how it failed
    fix: str | None = None  # fix given by the error, if any


def attempt(target: str, limit_s: float) -> TrialOutcome:
    """Calls `target`, the `module:function` that returns a string, in a child process.

    After `limit_s` seconds the child and all its processes are killed.
    """
    started = time.monotonic()
    root = str(Path(rlctl.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    with temporary_directory("doctor") as directory:
        result, log = directory / "result.json", directory / "log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlctl.doctor.attempt", target, str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**inherited, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                return TrialOutcome(False, f"hangs: nothing after {limit_s:g} s{_last_line(log)}")
            finally:  # engines start child processes
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if not result.exists():
            names = {-number: number.name for number in signal.Signals}
            return TrialOutcome(False, f"crashes ({names.get(code, f'exit code {code}')}){_last_line(log)}")
        outcome = TrialOutcome(**json.loads(result.read_text(encoding="utf-8")))
    if not outcome.works:
        return outcome
    return TrialOutcome(True, f"{outcome.found} ({time.monotonic() - started:.1f} s with its imports)")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"; last output: {_short(last)}" if last else ""


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _call(target: str) -> TrialOutcome:
    module, _, function = target.partition(":")
    try:
        return TrialOutcome(True, getattr(importlib.import_module(module), function)())
    except RlctlError as error:
        return TrialOutcome(False, _short(error.what), error.fix)
    except Exception as error:
        return TrialOutcome(False, f"fails: {_short(f'{type(error).__name__}: {error}')}")


def main(target: str, result: Path) -> None:
    """Entry point of the child: calls `target` and writes its outcome to `result` atomically."""
    partial = result.with_suffix(".part")
    partial.write_text(json.dumps(asdict(_call(target))), encoding="utf-8")
    partial.replace(result)
    sys.stdout.flush()
    os._exit(0)  # a hanging thread or destructor must not change the outcome


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
