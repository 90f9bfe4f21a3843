"""Try something in a process of its own, so that its crash or its hang is a line of the report.

`python -m rlctl.doctor.attempt MODULE:FUNCTION FILE` is the other side: it calls the function and
leaves what that said in the file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import rlctl
from rlctl.errors import RlctlError

#: Under a launcher these would make the trial wait for ranks that never come.
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Characters of an error that are shown.
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended.

    Attributes:
        works: whether it did what it should.
        found: what it said, or how it died.
        fix: where its own error knew what to do.
    """

    works: bool
    found: str
    fix: str | None = None


def attempt(target: str, limit_s: float) -> Outcome:
    """Call `target`, a `module:function` that returns a string, in a child process.

    Args:
        target: what to call.
        limit_s: seconds until the child, and whatever it has started, is killed.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlctl-doctor-") as directory:
        said, log = Path(directory) / "said.json", Path(directory) / "log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "rlctl.doctor.attempt", target, str(said)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                return Outcome(False, f"hangs: nothing after {limit_s:g} s{_last_line(log)}")
            finally:
                _end(child)
        if not said.exists():
            return Outcome(False, f"crashes ({_ending(code)}){_last_line(log)}")
        outcome = Outcome(**json.loads(said.read_text(encoding="utf-8")))
    if not outcome.works:
        return outcome
    return Outcome(True, f"{outcome.found} ({time.monotonic() - begun:.1f} s with its imports)")


def _environment() -> dict[str, str]:
    """Ours, without a launcher's ranks and the hub; the child finds rlctl where we did."""
    root = str(Path(rlctl.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    mine = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    return {**mine, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child's session: engines have processes of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing left, or dying already
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"; its last words: {_short(last)}" if last else ""


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _call(target: str) -> Outcome:
    module, _, function = target.partition(":")
    try:
        return Outcome(True, getattr(importlib.import_module(module), function)())
    except RlctlError as error:
        return Outcome(False, _short(error.what), error.fix)
    except Exception as error:
        return Outcome(False, f"fails: {_short(f'{type(error).__name__}: {error}')}")


def main(target: str, said: Path) -> None:
    """In the child: call `target` and leave its outcome in `said`, complete or not at all."""
    outcome = _call(target)
    partial = said.with_suffix(".part")
    content = {"works": outcome.works, "found": outcome.found, "fix": outcome.fix}
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(said)
    sys.stdout.flush()
    os._exit(0)  # a thread or a destructor that hangs at the end of an engine is no failure of the trial


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
