"""The wheel installs, runs and uninstalls, with every Python version that this machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
PURELIB = sysconfig.get_path("purelib")


def interpreter(version: str) -> str | None:
    """A Python of this version on this machine, for example one of pyenv, whose shims may have none."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (shutil.which(f"python{version}"), *versions.glob(f"{version}.*/bin/python{version}")):
        if path and not subprocess.run([path, "--version"], capture_output=True, check=False).returncode:
            return str(path)
    return None


@pytest.mark.slow
def test_installed_it_runs_and_uninstalled_it_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    installs_and_uninstalls(sys.executable, wheel, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_with_each_python_version(version: str, wheel: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    installs_and_uninstalls(python, wheel, tmp_path)


def installs_and_uninstalls(python: str, wheel: Path, tmp_path: Path) -> None:
    subprocess.run([python, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    (packages,) = tmp_path.glob("lib/python3*/site-packages")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [*PIP, "--python", str(tmp_path / "bin" / "python")]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True, env=alone)
    assert (packages / "rlctl" / "presets").is_dir()
    compiled = [str(tmp_path / "bin" / "python"), "-m", "compileall", "-q", str(packages / "rlctl")]
    subprocess.run(compiled, check=True)  # also checks the syntax of every file
    if python == sys.executable:  # this environment's packages can be its dependencies
        script, env = [str(tmp_path / "bin" / "rlctl"), "--version"], {"PYTHONPATH": PURELIB}
        done = subprocess.run(script, capture_output=True, text=True, check=True, env=alone | env)
        assert done.stdout.startswith("rlctl 0.")
    subprocess.run([*pip, "uninstall", "-y", "rlctl"], check=True, env=alone)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
