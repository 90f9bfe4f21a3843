"""The architecture is as documented: imports point down and in no circle, packages are empty, class names are
unique, the wheel brings its presets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]


def test_imports_point_down_only() -> None:
    command = "from importlinter.cli import lint_imports_command as lint; lint()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_imports_form_no_circle() -> None:
    """Within packages too, for imports at module level, in functions and for types only."""
    graph = grimp.build_graph("rlctl", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    left = dict(imported)
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    # What is left imports a circle or is part of one: leave out what nothing left imports.
    while unused := set(left) - {needed for needs in left.values() for needed in needs}:
        for module in unused:
            del left[module]
    assert sorted(left) == []


def test_a_class_name_means_one_class() -> None:
    names = Counter(
        name
        for path in (ROOT / "rlctl").rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
        if not name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_packages_are_empty() -> None:
    packages = sorted((ROOT / "rlctl").glob("*/**/__init__.py"))  # the top one is the Python API
    assert len(packages) > 10
    assert [str(path) for path in packages if path.read_text().strip()] == []


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a directory of its own, its dependencies being this environment's."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    return target


#: Each runs in the process of the ones before.
COMMANDS = [
    ["--help"],
    ["--version"],
    ["train", "--help"],
    ["train", "--dry-run"],
    ["train", "--preset", "rloo-seq-is", "--dry-run"],
    ["train", "--preset", "ppo-seq-is-token-rs", "--dry-run"],
    ["presets", "list"],
    ["explain", "--format", "schema"],
    ["explain", "grpo"],
]
PROBE = """
import json, sys
from rlctl.cli.app import run
import rlctl
print("FROM", rlctl.__file__)
for words in json.loads(sys.argv[1]):
    code = run(words)
    print("CODE", code, sorted({"torch", "transformers", "deepspeed", "pyarrow", "wandb"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_wheel_is_whole_and_light(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(COMMANDS)],
        cwd=tmp_path,  # away from the checkout
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"FROM {installed}" in done.stdout, done.stderr
    ended = [line for line in done.stdout.splitlines() if line.startswith("CODE ")]
    assert ended == ["CODE 0 []"] * len(COMMANDS), done.stdout + done.stderr


@pytest.mark.slow
def test_wheel_ships_every_preset(installed: Path) -> None:
    ours = {path.relative_to(ROOT / "presets") for path in (ROOT / "presets").rglob("*.yaml")}
    theirs = {
        path.relative_to(installed / "rlctl/presets") for path in installed.rglob("rlctl/presets/**/*.yaml")
    }
    assert ours
    assert ours == theirs
