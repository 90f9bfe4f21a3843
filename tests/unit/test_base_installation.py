"""What the base installation may import, and the commands that work with it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlctl import extras
from tests.cli.test_report_command import a_run

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: What modules of the base installation may import when they are imported, besides Python's own and rlctl's.
ALLOWED = {
    *("filelock", "jinja2", "markupsafe", "numpy", "orjson", "packaging", "platformdirs", "plotly"),
    *("psutil", "pyarrow", "pydantic", "pydantic_core", "regex", "rich", "scipy", "typer", "yaml"),
}
#: Modules of the base installation: all below one of these, except those of `NEEDS_MORE`.
BASE = (
    *("rlctl.cli", "rlctl.run_spec", "rlctl.convert", "rlctl.diagnose", "rlctl.doctor", "rlctl.prepare"),
    *("rlctl.data", "rlctl.report", "rlctl.reward", "rlctl.registry", "rlctl.user_code", "rlctl.files"),
    *("rlctl.evaluate", "rlctl.model_files", "rlctl.batch", "rlctl.errors", "rlctl.extras", "rlctl.track"),
    *("rlctl.html_page", "rlctl.algos"),
    *("rlctl.train.preflight", "rlctl.train.first_row", "rlctl.train.infer"),
)
NEEDS_MORE = {
    *("rlctl.algos.correction", "rlctl.algos.score_centering", "rlctl.evaluate.api_model"),
    "rlctl.evaluate.local_model",
    *("rlctl.reward.expressions", "rlctl.track.mlflow", "rlctl.track.tensorboard", "rlctl.track.trackio"),
    "rlctl.track.wandb",
}


def imports(path: Path, *, deferred: bool) -> Iterator[str]:
    """What a file imports when it is imported and, if `deferred`, in functions; nothing for types only."""
    stack: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif deferred or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stack += ast.iter_child_nodes(node)


def modules() -> dict[str, Path]:
    files = {path: path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / "rlctl").rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for path, parts in files.items()}


def is_foreign(module: str) -> bool:
    root = module.partition(".")[0]
    return root != "rlctl" and root not in sys.stdlib_module_names


def test_modules_of_the_base_installation_import_only_what_is_allowed() -> None:
    files = modules()
    waiting = [name for name in files if any(name == base or name.startswith(f"{base}.") for base in BASE)]
    base = set(waiting) - NEEDS_MORE
    assert set(waiting) >= NEEDS_MORE
    waiting = sorted(base)
    wrong = []
    while waiting:
        name = waiting.pop()
        for imported in imports(files[name], deferred=False):
            if is_foreign(imported) and imported.partition(".")[0] not in ALLOWED:
                wrong.append(f"{name} imports {imported}")
            elif imported in files and imported not in base:  # what it imports belongs to the base, too
                base.add(imported)
                waiting.append(imported)
    assert sorted(wrong) == []


def test_every_import_belongs_to_the_base_or_to_an_extra() -> None:
    known = ALLOWED | {module for modules_of in extras.EXTRAS.values() for module in modules_of}
    by_a_user = {"confine", "peer", "_typeshed"}  # local modules of a jail; types of the checker
    foreign = {
        imported.partition(".")[0]
        for path in modules().values()
        for imported in imports(path, deferred=True)
        if is_foreign(imported)
    }
    assert foreign - by_a_user <= known
    assert extras.EXTRAS.keys() <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("extra", ["formats", "train"])
def test_each_module_is_brought_by_its_extra(extra: str) -> None:
    brought = modules_of(closure(PROJECT["optional-dependencies"][extra]))
    assert set(extras.EXTRAS[extra]) <= brought | {"liger_kernel"}
    assert not set(extras.EXTRAS[extra]) & modules_of(closure(PROJECT["dependencies"]))


def closure(texts: list[str]) -> set[str]:
    """Canonical names of the installed packages that are required, also by one another."""
    waiting, required = [Requirement(text) for text in texts], set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in required or name == "rlctl" or (requirement.marker and not requirement.marker.evaluate()):
            continue
        required.add(name)
        try:
            waiting += [Requirement(text) for text in metadata.requires(name) or () if "extra ==" not in text]
        except metadata.PackageNotFoundError:
            continue
    return required


@cache
def packages_of_modules() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def modules_of(packages: set[str]) -> set[str]:
    """Top-level modules of these packages."""
    return {
        module
        for module, names in packages_of_modules().items()
        if packages & set(map(canonicalize_name, names))
    }


#: Module that Python imports when it starts, in every process: packages outside the base are not found.
_SITE = """
import sys
from importlib.machinery import PathFinder

ALLOWED = {allowed!r}

class BaseFinder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        if spec is None or path is not None or name in ALLOWED:
            return spec
        where = [spec.origin or "", *(spec.submodule_search_locations or ())]
        return None if any("site-packages" in text for text in where) else spec

sys.meta_path[sys.meta_path.index(PathFinder)] = BaseFinder
"""
#: Reads command lines as JSON, runs them all, and writes exit code, output and errors of each.
_RUN = """
import contextlib, io, json, sys
from rlctl.cli.app import run
results = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    results.append([code, out.getvalue(), err.getvalue()])
assert "torch" not in sys.modules
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with inputs, and in `site` the module that hides packages."""
    path = tmp_path_factory.mktemp("base")
    (path / "site").mkdir()
    site = _SITE.format(allowed=modules_of(closure(PROJECT["dependencies"])))
    (path / "site/sitecustomize.py").write_text(site)
    sums = [{"question": f"What is {n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(30)]
    letters = [
        {"question": f"Which is more? A. {n} B. {2 * n + 1}", "answer": "B", "data_source": "mmlu"}
        for n in range(30)
    ]
    logged = [{"step": n, "reward": 0.1 * n, "actor/entropy": 1.0} for n in range(1, 30)]
    for name, rows in {"sums": sums, "letters": letters, "log": logged}.items():
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "work.py").write_text("from trl import GRPOConfig\nc = GRPOConfig(beta=0.01)\n")
    (path / "work.sh").write_text("python -m verl.trainer.main_ppo data.train_batch_size=16\n")
    (path / "run.wandb").write_bytes(b":W&B\x01\xbe\x00" + bytes(64))
    a_run(path / "run")
    return path


def results(directory: Path, *commands: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command where only the base installation can be imported."""
    paths = os.pathsep.join(map(str, (directory / "site", ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps([command.split() for command in commands])],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(each) for each in json.loads(done.stdout)]


@pytest.mark.slow
def test_commands_that_read_work_without_the_extras(directory: Path) -> None:
    commands = [
        *("--help", "presets list", "explain actor.lr", "evaluate list"),
        *("diagnose log.jsonl", "diagnose log.jsonl --format html --out log.html", "import work.py"),
        *("report run", "samples run", "diagnose run", "runs ."),
        "prepare-data parquet letters.jsonl --out letters --val-size 4",
        "prepare-data parquet sums.jsonl --out sums --val-size 4",
        *("prepare-data check sums/train.parquet", "prepare-data show sums/train.parquet -n 1"),
        "train --preset rloo-seq-is --dry-run",
        "train --model Qwen/Qwen3-0.6B --data sums/train.parquet --reward maths --dry-run",
    ]
    done = dict(zip(commands, results(directory, *commands), strict=True))
    failed = {command: (out[-500:], err) for command, (code, out, err) in done.items() if code}
    assert failed == {}
    said = {command: out for command, (_, out, _) in done.items()}
    letters, sums, *_ = (said[command] for command in commands if command.startswith("prepare-data parquet"))
    for text in (letters, sums):
        assert "near duplicates were not searched: the package rensa is not installed" in text
        assert "fix: pip install 'rlctl[formats]'" in text
    assert "not checked" not in letters  # this grader needs no package
    for text in (sums, said["prepare-data check sums/train.parquet"]):
        assert "was not checked: its grader needs the package math-verify" in text
        assert "pip install 'rlctl[train]'" in text
    plan = said[commands[-1]]
    assert "the run can start after pip install 'rlctl[train]'" in plan
    for name in ("models and engines", "the prompt", "the reward maths"):
        assert f"not checked: {name}: the package" in plan


@pytest.mark.slow
def test_commands_that_need_an_extra_name_the_line_to_type(directory: Path) -> None:
    commands = [
        ("train", "train --preset rloo-seq-is"),
        ("train", "reward maths --data sums.jsonl"),
        ("train", "evaluate Qwen/Qwen3-8B --data sums.jsonl"),
        ("train", "evaluate smollm2-135m --data sums.jsonl"),
        ("formats", "import work.sh"),
        ("formats", "diagnose run.wandb"),
        ("formats", "prepare-data parquet letters.jsonl --out two --near-duplicates drop"),
    ]
    done = results(directory, *(command for _, command in commands))
    for (extra, command), (code, _, err) in zip(commands, done, strict=True):
        assert code == 4, (command, err)
        assert f"fix  pip install 'rlctl[{extra}]'" in err, command
        assert "bug" not in err
    assert not (directory / "runs").exists()  # nothing was started


def test_another_missing_module_is_no_extra() -> None:
    assert extras.missing_package(ModuleNotFoundError(name="rlctl.no_such")) is None
    assert extras.missing_package(ModuleNotFoundError(name="no_such_package")) is None
    assert extras.missing_package(ImportError("cannot import name", name="torch")) is None
    assert extras.missing_package(ModuleNotFoundError(name="torch.no_such")) is None  # torch is there
