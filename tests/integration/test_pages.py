"""The command blocks of README and `docs/`, run as they stand on the page, from top to bottom.

A block that is not run has a comment with the reason above it: `<!-- not run: needs 8 GPUs -->`. The
first-run tutorial trains as written; on other pages a run has two steps and an evaluation four questions. The
model `smollm2-135m` is a tiny one here. Python blocks whose first line is a file's name become that file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from docs.generate import BLOCK as GENERATED
from rlctl.files import cached_directory
from rlctl.run_spec.model_size import named_directory
from tests import runs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
AS_WRITTEN = "docs/tutorial/first-run.md"
BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"^ {0,3}(\$ )?(rlctl|python|pip|make|torchrun|deepspeed|srun|sbatch|vllm|docker) ", re.MULTILINE
)
WRITES = re.compile(r"(?:--out |trainer\.run_dir=)([\w/-]+)")
FILE_NAME = re.compile(r"# (\w+\.py)\n")
TRL_LOG = ROOT / "tests" / "unit" / "diagnose" / "samples" / "trl_trainer_state.json"
#: What the tutorials leave behind, in short.
SET_UP = f"""
rlctl train -p rloo-seq-is {" ".join(runs.SMALL)} trainer.total_training_steps=6 trainer.run_dir=runs/first
rlctl train -p rloo-seq-is {" ".join(runs.SMALL)} trainer.total_training_steps=6 trainer.run_dir=runs/stale
rlctl prepare-data parquet sums.csv --out data/sums --val-size 20
rlctl prepare-data parquet gsm8k/train.jsonl --out data/gsm8k
rlctl evaluate runs/first --limit 4 --n 2 --out evaluations/before
rlctl evaluate runs/stale --limit 4 --n 2 --out evaluations/after
"""
#: `rlctl` of the pages: fewer steps and questions, unless the command says how many.
SHORTER = """#!/bin/bash
words=" $* "
case "$1 $2" in
  train*)
    case "$words" in *" --dry-run "*|*" --resume "*) ;;
      *) set -- "$@" trainer.total_training_steps=2 trainer.test_freq=-1 ;; esac ;;
  "evaluate compare"*|"evaluate list"*) ;;
  evaluate*) case "$words" in *" --limit "*|*" --regrade "*) ;; *) set -- "$@" --limit 4 ;; esac ;;
esac
exec {rlctl} "$@"
"""


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Reason for not running it, language and text of each block that is not generated."""
    return BLOCK.findall(GENERATED.sub("", page.read_text(encoding="utf-8")))


def commands(page: Path) -> list[str]:
    return [text for reason, language, text in blocks(page) if language == "bash" and not reason]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_in_blocks_of_bash(page: Path) -> None:
    """Otherwise they would be neither run nor marked."""
    found = [text for _, language, text in blocks(page) if language in {"", "sh", "console", "text"}]
    assert [text for text in found if COMMAND.search(text)] == []
    assert page.read_text(encoding="utf-8").count("<!-- not run:") == sum(
        bool(reason) and language == "bash" for reason, language, _ in blocks(page)
    )


def test_tests_that_reasons_name_exist() -> None:
    reasons = [reason for page in PAGES for reason, _, _ in blocks(page)]
    named = re.findall(r"tests/[\w/]+(?:\.py)?", " ".join(reasons))
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.fixture(scope="module")
def after_the_tutorials(
    tmp_path_factory: pytest.TempPathFactory, embedded_cache: Path, forked_commands: Path
) -> Path:
    """A directory with the runs, data and evaluations that pages name; `cache` is that of rlctl."""
    from tests.own_model import save_tiny_qwen2

    where = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patched:
        shutil.copytree(embedded_cache, where / "cache")
        patched.setenv("RLCTL_CACHE", str(where / "cache"))
        patched.chdir(where)
        cached_directory(
            named_directory("smollm2-135m"), lambda path: save_tiny_qwen2(path, context=1024), what="a model"
        )
        shutil.copytree(named_directory("smollm2-135m"), "my-model")
        (where / "gsm8k.jsonl").write_text("".join(worked(i) for i in range(1319)))
        (where / "gsm8k").mkdir()
        (where / "gsm8k" / "train.jsonl").write_text("".join(worked(i) for i in range(2000, 2060)))
        (where / "sums.csv").write_text(
            "question,answer\n"
            + "".join(f"What is {a} + {b}?,{a + b}\n" for a in range(19) for b in range(10))
        )
        (where / "rewards.py").write_text(
            "def score(response, ground_truth):\n    return response == ground_truth\n"
        )
        shutil.copy(TRL_LOG, "trainer_state.json")
        write_files(ROOT / "docs" / "tutorial" / "beside-trl.md", where)
        (where / "mine.yaml").write_text("actor.lr: 1e-4\n")
        shutil.copytree(ROOT / "examples", where / "examples")
    shorter = where / "bin" / "rlctl"
    shorter.parent.mkdir()
    shorter.write_text(SHORTER.replace("{rlctl}", str(forked_commands / "rlctl")))
    shorter.chmod(0o755)
    (where / ".venv" / "bin").mkdir(parents=True)
    (where / ".venv" / "bin" / "activate").touch()
    run_in(where, SET_UP, [str(forked_commands)], where / "cache")
    return where


def run_in(where: Path, text: str, path: list[str], cache: Path) -> str:
    """Standard output of a block of bash, which must succeed, in a directory."""
    environment = os.environ | {
        "PATH": os.pathsep.join([*path, os.environ["PATH"]]),
        "RLCTL_CACHE": str(cache),
        "RLCTL_BENCHMARKS": str(cache.parent),
        "PYTHONPATH": str(ROOT),
    }
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def write_files(page: Path, where: Path) -> None:
    """Writes the Python blocks that begin with a file's name."""
    for _, language, text in blocks(page):
        if language == "python" and (name := FILE_NAME.match(text)):
            (where / name[1]).write_text(text, encoding="utf-8")


def worked(i: int) -> str:
    """A question in GSM8K's format."""
    answer = f"{i}+2=<<{i}+2={i + 2}>>{i + 2}\n#### {i + 2}"
    return json.dumps({"question": f"Tom has {i} pens and buys 2. How many now?", "answer": answer}) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_as_written(
    page: Path, after_the_tutorials: Path, whole_embedded_cache: Path, forked_commands: Path, tmp_path: Path
) -> None:
    path, cache, where = [str(forked_commands)], whole_embedded_cache, tmp_path / "here"
    if page == ROOT / AS_WRITTEN:
        where.mkdir()
    else:
        shutil.copytree(after_the_tutorials, where, ignore=shutil.ignore_patterns("cache", "gsm8k.jsonl"))
        for written in WRITES.findall("".join(commands(page))):
            shutil.rmtree(where / written, ignore_errors=True)
        path, cache = [str(where / "bin"), *path], after_the_tutorials / "cache"
    write_files(page, where)
    outputs = [run_in(where, text, path, cache) for text in commands(page)]
    if page == ROOT / AS_WRITTEN:
        stale = outputs[3].split("CRITICAL")[1]
        assert "[policy-gap]" in stale.splitlines()[0], "the worst finding is the one the page names"
        assert "CRITICAL" not in outputs[4].split("runs/stale")[0]
