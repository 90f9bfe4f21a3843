"""A plain step runs no module without a reason, as a capability that is off would be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "modules_of_a_step.py"


@pytest.mark.slow
def test_every_module_of_a_step_has_a_reason() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1].split()[0]) <= 44
