"""A training process imports no package that its run does not use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs

CODE = """
import sys, rlctl
settings = dict(item.split("=", 1) for item in sys.argv[2:])
settings |= {"trainer.total_training_steps": 2, "trainer.logger": [], "trainer.run_dir": sys.argv[1]}
rlctl.train(rlctl.load_spec("rloo-seq-is", settings))
print("MODULES", *sys.modules)
"""
UNUSED = {"datasets", "scipy.optimize", "sklearn", "tensorboard", "triton", "vllm", "wandb"}


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_a_run_imports_no_package_that_it_does_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, "-c", CODE, str(tmp_path / "run"), *runs.SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("MODULES")]
    loaded = set(line.split())
    assert {"deepspeed", "rlctl.rollout.hf"} <= loaded
    assert sorted(loaded & UNUSED) == []
