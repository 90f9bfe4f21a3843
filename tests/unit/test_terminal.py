"""No text controls the terminal: keys, values, arguments, and all that Rich prints."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from rlctl.cli.app import run
from rlctl.cli.command import echo
from rlctl.terminal import Console

ROOT = Path(__file__).parents[2]
HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e\r"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202e]|\x1b(?!\[[0-9;]*m)")


def _spec(tmp_path: Path, text: str) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "place", ["key", "section", "value", "argument", "argument's key", "option", "preset", "run"]
)
def test_text_of_users_and_files_is_escaped(tmp_path: Path, place: str, capsys) -> None:
    quoted = '"a\\e]0;title\\a\\e[2J\\u202e\\r"'
    arguments = {
        "key": ["train", _spec(tmp_path, f"actor:\n  {quoted}: 1\n"), "--dry-run"],
        "section": ["train", _spec(tmp_path, f"{quoted}:\n  lr: 1\n"), "--dry-run"],
        "value": ["train", _spec(tmp_path, f"actor:\n  lr: {quoted}\n"), "--dry-run"],
        "argument": ["train", f"actor.lr={HOSTILE}", "--dry-run"],
        "argument's key": ["train", f"actor.{HOSTILE}=1", "--dry-run"],
        "option": ["train", f"--{HOSTILE}"],
        "preset": ["train", "-p", HOSTILE],
        "run": ["samples", f"{tmp_path}/{HOSTILE}"],
    }[place]
    assert run(arguments) == 2
    printed = "".join(capsys.readouterr())
    assert "title" in printed
    assert not CONTROLS.search(printed), repr(printed)


def test_the_console_escapes_text_in_every_renderable() -> None:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table("heading")
    table.add_row(HOSTILE)
    for forced in (False, True):
        file = io.StringIO()
        console = Console(file=file, force_terminal=forced, width=80)
        for renderable in (HOSTILE, Text(HOSTILE, style="red"), table, Panel(HOSTILE, title=HOSTILE)):
            console.print(renderable, soft_wrap=renderable is HOSTILE)
        assert not CONTROLS.search(file.getvalue()), repr(file.getvalue())


def test_plain_output_is_escaped(capsys) -> None:
    echo(HOSTILE)
    assert not CONTROLS.search(capsys.readouterr().out)


def test_text_becomes_output_in_one_place() -> None:
    """Nothing else prints, or builds a console that does not escape."""
    consoles = r"from rich\.console import [^\n]*\bConsole\b"
    ways = re.compile(rf"(?<![\w.])print\(|typer\.s?echo\(|{consoles}")
    found = {
        path.relative_to(ROOT).as_posix(): ways.findall(path.read_text())
        for path in (ROOT / "rlctl").rglob("*.py")
        if ways.search(path.read_text())
    }
    # An example in a docstring; the program that runs graded code, whose output is read by its parent.
    others = {"rlctl/__init__.py", "rlctl/reward/sandbox/run_program.py"}
    assert set(found) <= {"rlctl/cli/command.py", *others}, found
