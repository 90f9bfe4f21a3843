"""Names of code in prose exist: in backticks on pages, in docstrings and in comments.

Checked are keys of the spec, paths of the repository, attributes of the package's classes, and other names
with an underscore or an inner capital.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs.generate import BLOCK
from rlctl.run_spec.key_table import key_rows

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "rlctl").rglob("*.py"))
CODE = PACKAGE + [path for name in ("benchmarks", "examples", "docs") for path in (ROOT / name).rglob("*.py")]
CODE += [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
DATA = [
    path for end in ("toml", "yaml", "jinja", "json", "pyi") for path in (ROOT / "rlctl").rglob(f"*.{end}")
]
DATA += [*(ROOT / "presets").rglob("*.yaml"), ROOT / "pyproject.toml", ROOT / "Makefile"]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += [page for page in (ROOT / "docs").rglob("*.md") if page.name != "import-keys.md"]
#: Names of other programs that no file of the repository uses.
FOREIGN = {
    *("return_sampling_mask", "FlatLogprobs"),  # vLLM
    *("force_on_policy_ratio", "rollout_rs_seq_max_k2_max"),  # verl
    *("WANDB_ENTITY", "WANDB_BASE_URL", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "KillWait"),
    *("env_mask", "seq_logprob_error_threshold", "max_token_staleness"),
    *("StorageReader", "sub_group_size", "model.generate", "commonsense_qa"),
}
IN_BACKTICKS = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
KEY = re.compile(r"[a-z]\w*(?:\.[a-z]\w*)+")
OF_A_CLASS = re.compile(r"([A-Z]\w+)\.(\w+)")
NAME = re.compile(r"_*[A-Za-z]\w*")
NUMBERED = re.compile(r"\w+_\d{4,}")
PATH = re.compile(r"(?:rlctl|tests|benchmarks|examples|presets|docs)/[\w./-]+\.(?:py|toml|yaml|md|json)")


@cache
def known_words() -> frozenset[str]:
    """Words of code and data files outside backticks: names that only prose has are not among them."""
    texts = (path.read_text(encoding="utf-8") for path in [*CODE, *DATA])
    return frozenset(word for text in texts for word in NAME.findall(IN_BACKTICKS.sub("", text)))


@cache
def attributes() -> dict[str, set[str]]:
    """Class of the package → its attributes, those of its bases included."""
    own: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own[node.name] |= set(_attributes(node))
                bases[node.name] |= {base.id if isinstance(base, ast.Name) else "?" for base in node.bases}
    return {name: _inherited(name, own, bases, set()) for name in own}


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child.name
        elif (
            isinstance(child, ast.Attribute)
            and isinstance(child.value, ast.Name)
            and child.value.id == "self"
        ):
            yield child.attr
    for child in node.body:
        if isinstance(child, ast.AnnAssign | ast.Assign):
            targets = [child.target] if isinstance(child, ast.AnnAssign) else child.targets
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _inherited(name: str, own: dict[str, set[str]], bases: dict[str, set[str]], seen: set[str]) -> set[str]:
    if name in seen:
        return set()
    seen.add(name)
    if name not in own:
        return {"?"}  # of another package
    return own[name].union(*(_inherited(base, own, bases, seen) for base in bases[name]))


@cache
def keys() -> frozenset[str]:
    """Keys of the spec, and their sections."""
    names = {row.key for row in key_rows()}
    return frozenset(names | {".".join(name.split(".")[:depth]) for name in names for depth in (1, 2, 3)})


def why_unknown(name: str) -> str:
    """What is wrong with a name in backticks; an empty text if it exists or is no name of code."""
    if name in FOREIGN or NUMBERED.fullmatch(name):
        return ""
    if PATH.fullmatch(name):
        return "" if (ROOT / name).exists() else "no such file"
    if match := OF_A_CLASS.fullmatch(name):
        known = attributes().get(match[1])
        return "" if known is None or known & {match[2], "?"} else f"{match[1]} has no {match[2]}"
    if KEY.fullmatch(name) and name.partition(".")[0] in {key for key in keys() if "." not in key}:
        is_file = name.rpartition(".")[2] in {"py", "md", "yaml", "json", "toml", "jsonl", "parquet", "html"}
        free = any(name.startswith(f"{key}.") for key in keys() if key.count("."))  # keys of free mappings
        return "" if name in keys() or is_file or free else "no such key"
    if NAME.fullmatch(name) and ("_" in name.strip("_") or re.search(r"[a-z][A-Z]", name)):
        return "" if name in known_words() else "occurs nowhere in the code"
    return ""


def faults(text: str) -> list[str]:
    problems = {name: why_unknown(name) for name in IN_BACKTICKS.findall(text)}
    return [f"`{name}`: {problem}" for name, problem in problems.items() if problem]


@pytest.mark.parametrize(
    ("text", "num_faults"),
    [
        ("`actor.lr`, `actor.learning_speed`", 1),
        ("`rlctl/algos/correction.py` and `rlctl/algos/corection.py`", 1),
        ("`Sampled.kept_by_nobody`", 0),  # no class of that name is in the package
        ("`TokenBatch.columns`, `TokenBatch.kolumns`", 1),
        ("`old_log_probs`, `very_old_log_probs`", 1),
        ("`ppo`, `12+34=`, `--dry-run`, `N`", 0),
        ("`data.nothing_of_the_kind`", 1),
    ],
)
def test_names_that_do_not_exist_are_found(text: str, num_faults: int) -> None:
    assert len(faults(text)) == num_faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_on_pages(page: Path) -> None:
    text = FENCED.sub("", BLOCK.sub("", page.read_text(encoding="utf-8")))
    assert faults(text) == []


def test_names_in_the_package() -> None:
    """In docstrings, comments and messages."""
    problems = {path.name: faults(path.read_text(encoding="utf-8")) for path in PACKAGE}
    assert {name: some for name, some in problems.items() if some} == {}
