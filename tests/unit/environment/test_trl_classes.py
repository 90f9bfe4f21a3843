"""Classes as TRL's examples write them for `environment_factory`, unchanged: their tools, states and rewards.

Of their kinds: a server's client that is called by each tool, cumulative feedback, an exception at the end of
the game, tools of several games in one class, an event loop of its own, a property that computes the reward.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

from rlctl.environment.user_class import tool_schemas
from rlctl.user_code import load_function
from tests.scripted import asked, one_after_the_other, played

CLASSES = Path(__file__).with_name("trl_classes.py")
#: Class → what the policy says, in turns: (tool, arguments), or a text.
ECHO = [("echo", {"message": "Hello World!"}), "done"]
WORDS = [("guess", {"guess": word}) for word in ("[crate]", "[slate]", "[crane]", "[slate]")]


def said(*turns: object) -> list[str]:
    return [
        turn
        if isinstance(turn, str)
        else f"<tool_call>{json.dumps({'name': turn[0], 'arguments': turn[1]})}</tool_call>"
        for turn in turns
    ]


@pytest.mark.parametrize(
    ("name", "row", "turns", "reward", "stop_reason", "read"),
    [
        ("EchoToolEnv", {}, ECHO, 1.5, "completed", ["Hello World!"]),
        # the exception after the end of the game is not reached: `done` ends the episode
        ("WordEnv", {"word": "crane"}, WORDS, 1.0, "tool_stopped", ["GGGXG", "XXGXG", "GGGGG"]),
        ("WordEnv", {"word": "slate"}, [*WORDS[:1], ("guess", {"guess": "no"}), "I stop"], 0.0, "completed",
         ["XXGGG", "You attempted an invalid move"]),
        ("CatchEnv", {"column": 2}, [("move", {"direction": "left"}), ("stay", {}), ("stay", {})], 1.0,
         "tool_stopped", ["paddle 2", "paddle 2", "paddle 2"]),
        ("CatchEnv", {}, [("move", {"direction": "up"})], 0.0, "completed", ["Invalid direction 'up'"]),
        ("BothEnv", {"env": "catch"}, [WORDS[0], ("stay", {}), "done"], 0.0, "completed",
         ["guess is only available in Words", "paddle 3"]),
        ("BothEnv", {"env": "words", "word": "crane"}, [WORDS[2]], 1.0, "tool_stopped", ["GGGGG"]),
        ("BothEnv", {"env": "chess"}, [], None, "environment_error", []),
        ("IncrementEnv", {}, [("increment", {"a": 2}), ("increment", {"a": 3}), "5"], None, "completed",
         ["2", "5"]),
        ("DriveEnv", {}, [("observe", {}), ("lane_change", {"direction": "left"})], 1.0, "completed",
         ["Speed: 40.0", "Speed: 30.0"]),
        ("SandboxEnv", {"task": "count"}, [("bash", {"command": "wc"})], 1.0, "completed", ["ran wc"]),
        ("SandboxEnv", {}, [], None, "environment_error", []),
        ("BlocksEnv", {}, [("click", {"bid": "13"}), "done"], 0.5, "completed", ["clicked 13"]),
        ("CoinEnv", {}, [("reward", {"coins": 3})], None, "completed", ["gave 3"]),
        ("JudgedEnv", {}, ["yes"], 0.25, "completed", []),
    ],
)  # fmt: skip
def test_an_episode_of_a_class_has_its_observations_and_its_reward(
    name: str,
    row: dict[str, object],
    turns: list[object],
    reward: float | None,
    stop_reason: str,
    read: list[str],
    tmp_path: Path,
) -> None:
    task = asked(extra_info=row)
    says = one_after_the_other(*said(*turns), "done")
    [episode], _ = played(tmp_path, CLASSES.read_text(), says, [task], name=name)
    assert (episode.reward, episode.stop_reason) == (reward, stop_reason), episode.error
    assert bool(episode.error) == (stop_reason == "environment_error")
    tools = [message["content"] for message in episode.messages[2:] if message["role"] != "assistant"]
    assert len(tools) == len(read)
    assert all(part in text for part, text in zip(read, tools, strict=True)), tools


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("EchoToolEnv", "go<end>"),
        ("WordEnv", "goA word of 5 letters."),
        ("BlocksEnv", "goA page with a button."),
        ("SandboxEnv", "gocount\n\nYou have a single tool."),
    ],
)
def test_what_reset_returns_is_appended_to_the_question(name: str, beginning: str, tmp_path: Path) -> None:
    task = asked(extra_info={"word": "crane", "task": "count"})
    _, engine = played(tmp_path, CLASSES.read_text(), one_after_the_other("done"), [task], name=name)
    assert f"<|user|>{beginning}" in engine.read[0]


@pytest.mark.parametrize(
    "name", ["EchoToolEnv", "WordEnv", "CatchEnv", "BothEnv", "DriveEnv", "SandboxEnv", "BlocksEnv"]
)
def test_the_tools_are_those_that_trl_finds(name: str) -> None:
    """TRL 1.16 takes all functions of the class but `reset`, `get_reward` and those with an underscore."""
    kind = load_function(f"{CLASSES}:{name}", key="environment.name")
    members = dict(inspect.getmembers(kind, inspect.isfunction))
    theirs = {key: get_json_schema(member) for key, member in members.items() if key[0] != "_"
              and key not in {"reset", "get_reward"}}  # fmt: skip
    for schema in theirs.values():
        schema["function"]["parameters"]["properties"].pop("self", None)
    assert {tool["function"]["name"]: tool for tool in tool_schemas(kind)} == theirs
    sys.modules.pop(kind.__module__, None)
