"""The versions that `make test-lowest` installs are the lowest that pyproject.toml allows."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


#: Those that `make test-lowest` installs, by the extra `train`.
TEXTS = [
    text
    for texts in (PROJECT["dependencies"], *map(PROJECT["optional-dependencies"].get, ("formats", "train")))
    for text in texts
    if not text.startswith("rlctl")
]


def lowest() -> dict[str, str]:
    lines = (ROOT / "tests/lowest.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_every_lower_bound_is_tried() -> None:
    bounds = {}
    for text in TEXTS:
        requirement = Requirement(text)
        bounds[requirement.name] = next(
            part.version for part in requirement.specifier if part.operator == ">="
        )
    assert {name: Version(version) for name, version in lowest().items()} == {
        name: Version(version) for name, version in bounds.items()
    }


@pytest.mark.parametrize("version", ["0.18.0", "0.18.9", "0.19.4"])
def test_deepspeed_that_drops_offloaded_gradients_is_not_allowed(version: str) -> None:
    [deepspeed] = [Requirement(text) for text in TEXTS if text.startswith("deepspeed")]
    assert not deepspeed.specifier.contains(version)
    assert deepspeed.specifier.contains("0.19.8")


def test_the_newest_vllm_allowed_runs_on_the_newest_torch_allowed() -> None:
    """vLLM 0.33 requires torch 2.14."""
    texts = TEXTS + PROJECT["optional-dependencies"]["vllm"]
    allowed = {part.name: part.specifier for part in map(Requirement, texts)}
    assert allowed["vllm"].contains("0.33.0")
    assert not allowed["vllm"].contains("0.34.0")
    assert allowed["torch"].contains("2.14.0")
    assert not allowed["torch"].contains("2.15.0")


def test_the_base_installation_is_small_and_every_set_up_installs_what_trains() -> None:
    assert len(PROJECT["dependencies"]) <= 15
    makefile, docker = (ROOT / "Makefile").read_text(), (ROOT / "Dockerfile").read_text()
    assert makefile.count('install -q -e ".[train]"') == 2
    assert "install -q -e .\n" not in makefile
    assert "/src\n" not in docker
    for extra in ("vllm", "vllm-cpu", "liger", "ray", "verifiers"):
        assert PROJECT["optional-dependencies"][extra][0] == "rlctl[train]"
    assert PROJECT["optional-dependencies"]["dev"][0].startswith("rlctl[train,")
