"""Tools without a class: users' functions, Python in the sandbox, search, and servers of tools."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from rlctl.batch import Episode
from rlctl.environment.build import EpisodeSource
from rlctl.errors import UsageError
from rlctl.run_spec.environment import EnvironmentSpec
from tests.scripted import SAMPLING, TOKENIZER, ScriptedEngine, asked

TOOLS = '''
import os
calls = []

def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: A number.
        b: Another one.
    """
    return a + b

async def shout(text: str) -> str:
    """Says it louder.

    Args:
        text: A text.
    """
    return text.upper()

def fails(text: str) -> str:
    """Fails.

    Args:
        text: A text.
    """
    raise KeyError(text)

def untyped(text):
    return text

def reset(text: str) -> str:
    """Has a name that is taken.

    Args:
        text: A text.
    """
    return text

class Add:
    """A class."""

number = 7
'''
SERVER = '''
import os, subprocess, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")
notes = []

@server.tool()
def note(text: str) -> str:
    """Keeps a note."""
    notes.append(text)
    return " ".join(notes)

@server.tool()
def starts() -> str:
    """Starts a process that would outlive it."""
    return str(subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=subprocess.DEVNULL).pid)

@server.tool()
def fails(text: str) -> str:
    """Fails."""
    raise ValueError("no " + text)

@server.tool()
def ends() -> str:
    """Ends the server."""
    os._exit(1)

if __name__ == "__main__":
    server.run("stdio")
'''


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(tools: Sequence[str], *replies: str, n: int = 1, **given: Any) -> tuple[list[Episode], list[str]]:
    """Episodes in which the policy says these replies; what the tools answered in the last one."""
    spec = EnvironmentSpec(tools=list(tools), **given)
    source = EpisodeSource(spec, TOKENIZER, 6000)
    engine = ScriptedEngine(lambda text: replies[min(text.count("<|assistant|>") - 1, len(replies) - 1)])
    earlier = set(psutil.Process().children(recursive=True))
    try:
        episodes = source.sample(engine, [(asked(), member) for member in range(n)], SAMPLING, 1)
    finally:
        source.close()
        assert not set(psutil.Process().children(recursive=True)) - earlier
    return episodes, [m["content"] for m in episodes[-1].messages if m["role"] == "tool"]


@pytest.fixture
def tools(tmp_path: Path) -> str:
    (tmp_path / "tools.py").write_text(TOOLS)
    return str(tmp_path / "tools.py")


def test_functions_are_tools_and_the_last_reply_is_the_answer(tools: str) -> None:
    names = [f"{tools}:add", f"{tools}:shout", f"{tools}:fails"]
    replies = [
        call("add", a=2, b=3),
        call("shout", text="ü"),
        call("fails", text="x"),
        call("add", a="2"),
        "It is 5.",
    ]
    [first, second], said = play(names, *replies, n=2)
    assert (first.error, first.response, first.reward, first.stop_reason) == (
        "",
        "It is 5.",
        None,
        "completed",
    )
    assert said[:2] == ["5", "Ü"]
    assert "KeyError" in said[2]
    assert "wrong arguments" in said[3]
    assert second.metrics["num_tool_calls"] == 4
    assert second.metrics["tool_errors"] == 2


def test_tools_choose_their_environment() -> None:
    assert EnvironmentSpec(tools=["python"]).name == "tools"
    assert EnvironmentSpec(tools="python").is_multi_turn
    assert EnvironmentSpec().name == "single_turn"


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["{}:untyped"], "untyped has no schema"),
        (["{}:reset"], "cannot be called reset"),
        (["{}:Add"], "a tool is a function"),
        (["{}:number"], "not a function"),
        (["{}:missing"], "no such function"),
        (["{}:add", "{}:add"], "2 tools are called add"),
        (["pyton"], "no tool pyton"),
        (["search"], "needs a corpus"),
        (["mcp:no-such-program-here"], "no program"),
        (["mcp:http://example.com/mcp"], "on this machine"),
        (["mcp:https://127.0.0.1:1/mcp"], "on this machine"),
        (["mcp:http://127.0.0.1:1/mcp"], "does not answer"),
    ],
)
def test_wrong_tools_are_refused(tools: str, names: list[str], what: str) -> None:
    if names == ["search"]:
        pytest.importorskip("bm25s", reason="the extra rlctl[tools] is not installed")
    with pytest.raises(UsageError, match=what):
        play([name.format(tools) for name in names], "ok")


def test_python_keeps_its_names_within_an_episode() -> None:
    """And runs in the sandbox."""
    codes = [
        "def double(x):\n    return 2 * x\nx = 20",
        "print('x is', x)\ndouble(x) + 2",
        "1 / 0",
        "x +",
        "import os, socket\nopen('/etc/passwd')",
        "print(os.environ.get('HOME'))\nsocket.socket()",
        "print('y' * 10**7)",
        "exit()",
    ]
    [episode], said = play(["python"], *(call("python", code=code) for code in codes), "42")
    assert episode.error == ""
    assert said[0] == "(no output)"
    assert said[1] == "x is 20\n42\n"
    assert "ZeroDivisionError" in said[2]
    assert "SyntaxError" in said[3]
    assert "Error" in said[4]
    assert said[5].startswith("None\n")
    assert "PermissionError" in said[5]
    assert len(said[6]) < 5000
    assert said[7].startswith("SystemExit")


def test_python_that_hangs_or_is_killed_starts_again() -> None:
    codes = ["x = 1", "while True: pass", "x", "import os\nos._exit(0)", "2 + 2"]
    [episode], said = play(["python"], *(call("python", code=code) for code in codes), "4", tool_timeout="2s")
    assert episode.error == ""
    assert [text.startswith("Error: the interpreter was started again") for text in said] == [0, 1, 0, 1, 0]
    assert "NameError" in said[2]
    assert said[4] == "4\n"


def test_episodes_do_not_share_the_interpreter() -> None:
    """One has written the name; the others look for it."""
    episodes, _ = play(
        ["python"],
        call("python", code="try:\n    x += 1\nexcept NameError:\n    x = 1\nx"),
        "done",
        n=3,
        concurrency=1,
    )
    assert [[m["content"] for m in e.messages if m["role"] == "tool"] for e in episodes] == [["1\n"]] * 3


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_search_finds_passages(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("bm25s", reason="the extra rlctl[tools] is not installed")
    rows = [
        {"title": "Curie", "text": "Marie Curie discovered polonium and radium."},
        {"title": "Noether", "text": "Emmy Noether proved a theorem about symmetries."},
        {"title": "Lovelace", "text": "Ada Lovelace wrote the first program."},
    ]
    file = tmp_path / f"corpus.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file.write_text("\n\n".join(row["text"] for row in rows))
    queries = ["who discovered radium?", "theorem symmetries", "zebra", ""]
    [episode], said = play(
        ["search"],
        *(call("search", query=query) for query in queries),
        "Curie",
        params={"corpus": str(file), "num_results": 1},
    )
    assert episode.error == ""
    assert "polonium" in said[0]
    assert "Noether" in said[1]
    assert said[2:] == ["nothing was found"] * 2


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", '{"body": "x"}\n'), ("b.jsonl", "{"), ("c.txt", "\n\n"), ("d.parquet", "x")],
)
def test_a_corpus_without_texts_is_refused(tmp_path: Path, name: str, content: str) -> None:
    pytest.importorskip("bm25s", reason="the extra rlctl[tools] is not installed")
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match="corpus cannot be read"):
        play(["search"], "ok", params={"corpus": str(tmp_path / name)})


def test_a_server_of_tools_lives_as_long_as_the_episode(tmp_path: Path) -> None:
    """Its notes are of one episode; what it starts ends with it."""
    pytest.importorskip("mcp", reason="the extra rlctl[tools] is not installed")
    (tmp_path / "server.py").write_text(SERVER)
    name = f"mcp:{sys.executable} {tmp_path / 'server.py'}"
    replies = [
        call("note", text="a"),
        call("note", text="b"),
        call("fails", text="x"),
        call("starts"),
        call("ends"),
        call("note", text="c"),
    ]
    episodes, said = play([name], *replies, "ok", n=2, tool_timeout="60s")
    assert [episode.error for episode in episodes] == ["", ""]
    assert said[:2] == ["a", "a b"]
    assert "Error executing tool fails" in said[2]
    assert "error" in said[4]
    assert "error" in said[5]
    pids = [
        int(m["content"])
        for e in episodes
        for m in e.messages
        if m["role"] == "tool" and m["content"].isdecimal()
    ]
    assert len(pids) == 2
    for _ in range(200):
        if not any(map(psutil.pid_exists, pids)):
            break
        time.sleep(0.02)
    assert not any(map(psutil.pid_exists, pids))


def test_a_server_that_does_not_start_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the extra rlctl[tools] is not installed")
    (tmp_path / "server.py").write_text(dedent("raise SystemExit(1)"))
    with pytest.raises(UsageError, match="does not answer"):
        play([f"mcp:{sys.executable} {tmp_path / 'server.py'}"], "ok")
