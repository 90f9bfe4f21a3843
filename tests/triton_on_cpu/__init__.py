"""Triton's kernels on the CPU: vLLM's Model Runner V2 whole, interpreted, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType

from tests.processes import ROOT

#: To Python an installed package, with a backend of Triton and a plugin of vLLM.
BACKEND = Path(__file__).parent


def environment(*, interpreted: bool = True) -> dict[str, str]:
    """For a new process in which vLLM's CPU build takes Triton, and with it Model Runner V2."""
    path = os.pathsep.join([str(ROOT), str(BACKEND)])
    variables = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return kept | variables | ({"TRITON_INTERPRET": "1"} if interpreted else {})


def run_on_v2(function: FunctionType, *arguments: Path, log: Path) -> None:
    """Calls `function(*arguments)`, paths as str, in a new process with Model Runner V2; it must return 0.

    Not a fork: Triton reads whether it interprets when it is imported.
    """
    directory = Path(function.__code__.co_filename).parent  # pytest imports its files from their directories
    code = f"import sys; sys.path.append({str(directory)!r})\n"
    code += f"from {function.__module__} import {function.__name__} as function"
    command = [sys.executable, "-c", f"{code}; sys.exit(function(*sys.argv[1:]))", *map(str, arguments)]
    with log.open("wb") as output:
        done = subprocess.run(command, env=environment(), stdout=output, stderr=output, check=False)
    said, *_ = log.read_text().partition("nanobind: leaked")  # Triton's, at the end of any process
    assert done.returncode == 0, said[-4000:]
