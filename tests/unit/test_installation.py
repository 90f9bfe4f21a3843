"""The wheel installs, trains and uninstalls with every Python version that is here; the sdist builds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.unit.conftest import ROOT, built

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


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = built("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("rlctl-*")
    assert {path.name for path in source.iterdir()} >= {"CHANGELOG.md", "CITATION.cff", "LICENSE", "presets"}
    assert not (source / "tests").exists()
    with (
        zipfile.ZipFile(built("wheel", source, tmp_path / "wheel")) as ours,
        zipfile.ZipFile(wheel) as direct,
    ):
        contents = [{file.filename: file.CRC for file in each.infolist()} for each in (ours, direct)]
    assert contents[0] == contents[1]
    assert len(contents[0]) > 300


@pytest.mark.slow
def test_the_wheel_trains(wheel: Path, embedded_cache: Path, tmp_path: Path) -> None:
    """Its own presets, templates and console script; the packages are this environment's."""
    target, run = tmp_path / "target", tmp_path / "run"
    install = [*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(target), PURELIB)),
        "RLCTL_CACHE": str(embedded_cache),
    }

    def output(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import rlctl, rlctl.run_spec.sources as s; print(rlctl.__file__, s.presets_dir())"
    assert [Path(file).is_relative_to(target) for file in output(sys.executable, "-c", where).split()] == [
        True
    ] * 2
    rlctl = str(target / "bin" / "rlctl")
    settings = ("trainer.total_training_steps=1", f"trainer.run_dir={run}", "--plain")
    assert "result  reward" in output(rlctl, "train", "--preset", "rloo-seq-is", *settings)
    assert output(rlctl, "report", str(run)).strip() == str(run / "report.html")


def test_the_citation_names_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    needed = {"cff-version", "message", "title", "authors", "version", "license"}  # cff-version 1.2.0
    assert needed <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert all(author.keys() & {"name", "family-names"} for author in citation["authors"])
    assert f"## Unreleased: {project['version']}" in (ROOT / "CHANGELOG.md").read_text()
