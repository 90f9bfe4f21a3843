"""The data of the pages: each example is read, and every command beside it takes it.

An example is a block of JSON or CSV whose paragraph ends with the file's name: "… `games.jsonl`:". A command
beside it names the same file. A training is only checked (`--dry-run`): its first row goes through prompt and
environment.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rlctl.cli.app import run
from rlctl.files import cached_directory
from rlctl.prepare.data_files import read_any
from rlctl.prepare.text_files import parse_json
from rlctl.run_spec.model_size import named_directory
from tests.own_model import save_tiny_qwen2

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Name of the file in the line above, language, text.
EXAMPLE = re.compile(
    r"`([\w./-]+\.(?:jsonl?|csv|tsv))`:\n\n```(json|csv)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
BLOCK = re.compile(r"^```(json|csv)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BASH = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FUNCTION = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: An object of JSON in a line of text, with a column of prompts.
INLINE = re.compile(r"`(\{\"(?:prompt|question|problem|messages|instruction|input)\".*?\})`")


class Example(NamedTuple):
    page: Path
    name: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Commands of the page that read the file."""
        blocks = "\n".join(BASH.findall(self.page.read_text(encoding="utf-8"))).replace("\\\n", " ")
        return [line for line in blocks.splitlines() if re.search(rf"[ =]{re.escape(self.name)}\b", line)]


def examples() -> Iterator[Example]:
    for page in PAGES:
        for name, _, text in EXAMPLE.findall(page.read_text(encoding="utf-8")):
            yield Example(page, name, text)


EXAMPLES = list(examples())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_example_escapes(page: Path) -> None:
    """Data is in blocks with the name of a file; other blocks of JSON are no rows."""
    text = page.read_text(encoding="utf-8")
    assert INLINE.findall(text) == []
    named = {shown for _, _, shown in EXAMPLE.findall(text)}
    for language, shown in BLOCK.findall(text):
        is_rows = language == "csv" or INLINE.search(f"`{shown.splitlines()[0]}`")
        assert not is_rows or shown in named, shown


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    where = tmp_path_factory.mktemp("examples")
    shutil.copytree(ROOT / "examples", where / "examples")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RLCTL_CACHE", str(where / "cache"))
        patched.chdir(where)
        cached_directory(
            named_directory("smollm2-135m"), lambda path: save_tiny_qwen2(path, context=2048), what="a model"
        )
        yield where


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.page.stem} {example.name}")
def test_every_example_goes_through_its_commands(
    example: Example, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / example.name).write_text(example.text)
    for name, code in FUNCTION.findall(example.page.read_text(encoding="utf-8")):
        (place / name).write_text(code)
    rows = read_any([example.name])
    assert len(rows) >= 2
    if example.name.endswith("jsonl"):
        given = [parse_json(line.encode()) for line in example.text.splitlines()]
        columns = {name for row in given for name in row} - {"prompt", "question", "answer"}
        assert columns <= rows[0].extra.keys()
    assert example.commands, f"no command of {example.page.name} reads {example.name}"
    for line in example.commands:
        words = [word for word in shlex.split(line) if word != "$"]
        variables = [word for word in words if re.fullmatch(r"[A-Z_]+=\S+", word)]
        words = words[len(variables) :]
        assert words[0] == "rlctl", line
        with pytest.MonkeyPatch.context() as patched:
            for variable in variables:
                patched.setenv(*variable.split("=", 1))
            small = ["data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "--dry-run"]
            more = small if words[1] == "train" else []
            assert run([*words[1:], *more]) == 0, (line, "".join(capsys.readouterr()))
