"""Grading processes start without torch, trainers without sympy."""

import subprocess
import sys


def loaded_by(module):
    code = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_worker_needs_no_torch_and_imports_math_verify_late():
    loaded = loaded_by("rlctl.reward.worker")
    assert "torch" not in loaded
    assert "sympy" not in loaded
