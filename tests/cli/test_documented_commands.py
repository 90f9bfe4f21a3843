"""Commands in pages, examples and help texts: subcommands, options, presets and keys of the spec exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click
import pytest
from typer.main import get_command

from rlctl.cli.app import app
from rlctl.run_spec.keys import leaf_of
from rlctl.run_spec.sources import all_presets

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")])
APP = get_command(app)
PRESETS = set(all_presets())
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(rlctl [^`]+)`")
#: Words of pages that stand for something else.
PLACEHOLDER = re.compile(r"…|\.\.\.")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of rlctl, without its name."""
    blocks = [block.replace("\\\n", " ") for kind, block in FENCE.findall(text) if kind in {"", "bash"}]
    inline = [code.replace("\n", " ") for code in INLINE.findall(FENCE.sub("", text))]
    for line in chain("\n".join(blocks).splitlines(), inline):
        for part in re.split(r"&&|\s\|\s|;", line):
            if (found := re.match(r"\s*(?:\$ )?rlctl\s+(.+)", part)) and "COMMAND" not in part:
                yield [word for word in shlex.split(found[1], comments=True) if not PLACEHOLDER.search(word)]


def below(command: click.Command) -> dict[str, click.Command]:
    """The subcommands of a command by name."""
    names = getattr(command, "subcommands", ())
    return getattr(command, "commands", {}) | {name: command.subcommand(name) for name in names}  # type: ignore[attr-defined]


def examples(command: click.Command) -> Iterator[str]:
    """The lines of the help of a command, and of all below it, that are commands."""
    yield from re.findall(r"^ *(rlctl .+)$", command.help or "", re.MULTILINE)
    for one in below(command).values():
        yield from examples(one)


def problems(words: list[str]) -> Iterator[str]:
    command, words = APP, list(words)
    while words and words[0] in below(command):
        command = below(command)[words.pop(0)]
    if hasattr(command, "commands") and words and not words[0].startswith("-"):
        yield f"no command {words[0]}"
        return
    options = {name: one for one in command.params for name in (*one.opts, *one.secondary_opts)}
    while words:
        word = words.pop(0)
        if re.match(r"--?[A-Za-z]", word):
            name, has_value, value = word.partition("=")
            if name not in {*options, "--help", "-h"} and not (name == "--json" and "--format" in options):
                yield f"no option {name} of rlctl {command.name}"
            elif words and not has_value and not getattr(options.get(name), "is_flag", True):
                value = words.pop(0)
            if name in {"--preset", "-p"} and not value.endswith(".yaml") and value not in {*PRESETS, "NAME"}:
                yield f"no preset {value}"
        elif command.name == "train" and (setting := re.match(r"([a-z_]+(?:\.\w+)+)=", word)):
            yield from [] if leaf_of(setting[1]) else [f"no key {setting[1]}"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    if page.suffix == ".py":
        text = f"```\n{ast.get_docstring(ast.parse(text))}\n```"
    assert {problem: words for words in commands(text) for problem in problems(words)} == {}


def test_commands_of_help_texts_exist() -> None:
    found = list(commands("\n".join(["```", *examples(APP), "```"])))
    assert len(found) > 40
    assert {problem: words for words in found for problem in problems(words)} == {}


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("rlctl nonsense", "no command nonsense"),
        ("rlctl train --nonsense", "no option --nonsense of rlctl train"),
        ("rlctl train -p nonsense", "no preset nonsense"),
        ("rlctl train -p 8gpu actor.nonsense=1", "no key actor.nonsense"),
        ("rlctl prepare-data nonsense x.jsonl", "no command nonsense"),
    ],
)
def test_a_wrong_command_is_found(command: str, problem: str) -> None:
    text = f"```bash\npython x.py && {command}\n```"
    assert [one for words in commands(text) for one in problems(words)] == [problem]
