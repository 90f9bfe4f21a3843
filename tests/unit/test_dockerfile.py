"""The images cannot be built here: what their build reads, and what a container is given."""

from __future__ import annotations

import fnmatch
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").split("\nFROM ")[1:]
#: What a rank of several nodes needs of its container, besides GPUs and files.
FLAGS = ["--network=host", "--ipc=host", "--ulimit=memlock=-1", "--device=/dev/infiniband"]


def copied(stage: str) -> list[str]:
    """Sources of its COPY instructions, which all copy into /src under the same name."""
    found = []
    for line in re.findall(r"^COPY (.+)", stage, re.MULTILINE):
        *sources, target = line.split()
        assert target == "/src/" or [target] == [f"/src/{source}" for source in sources]
        found += sources
    return found


def is_in_context(path: str) -> bool:
    """Whether .dockerignore lets a file or directory through: the last matching line decides."""
    allowed = True
    for line in (ROOT / ".dockerignore").read_text().split():
        top = path.split("/", maxsplit=1)[0]
        if fnmatch.fnmatch(top, line.removeprefix("!").removeprefix("**/")):
            allowed = line.startswith("!")
    return allowed


def test_every_file_that_the_package_is_built_from_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {*wheel["packages"], *wheel["force-include"]}
    assert len(STAGES) == 2
    for stage in STAGES:
        assert set(copied(stage)) == needed
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = tracked.stdout.split()
    for source in needed:
        below = [name for name in files if name == source or name.startswith(f"{source}/")]
        assert below
        assert all(map(is_in_context, below))
    assert not is_in_context("tests/conftest.py")


def test_hadolint_accepts_it() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run(
        [hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_a_parser_reads_it() -> None:
    parser = pytest.importorskip("dockerfile_parse").DockerfileParser(str(ROOT), cache_content=True)
    assert parser.is_multistage
    assert [image.partition(":")[0] for image in parser.parent_images] == ["python", "nvidia/cuda"]
    instructions = [each["instruction"] for each in parser.structure]
    assert instructions.count("CMD") == len(STAGES)
    assert set(instructions) <= {"COMMENT", "FROM", "RUN", "COPY", "WORKDIR", "ENV", "CMD"}


def test_every_extra_of_an_image_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"/src\[([\w,-]+)\]", "".join(STAGES))
    assert {extra for each in named for extra in each.split(",")} <= extras.keys()


def test_a_container_runs_the_printed_commands_over_infiniband() -> None:
    assert "ENTRYPOINT" not in "".join(STAGES)  # with `rlctl` as entry point, torchrun would be its argument
    [cuda] = [stage for stage in STAGES if stage.startswith("nvidia/cuda")]
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(cuda.split())
    page = (ROOT / "docs/how-to/scale.md").read_text().replace("\\\n", " ")
    commands = [
        shlex.split(line, comments=True) for line in page.splitlines() if line.startswith("docker run")
    ]
    [on_nodes] = [words for words in commands if "torchrun" in words]
    assert set(FLAGS) <= set(on_nodes)
    assert "--gpus=all" in on_nodes
    for words in commands:  # the image, then the command
        image = next(word for word in words if word.startswith("rlctl:"))
        assert words[words.index(image) + 1] in {"rlctl", "torchrun"}


def test_make_builds_both() -> None:
    done = subprocess.run(["make", "-n", "image"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.findall(r"--target (\w+)", done.stdout) == ["cpu", "cuda"]
