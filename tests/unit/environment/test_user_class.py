"""A class in a user's file as the environment: what it receives, what its tools answer, and what it cannot
break."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.errors import RlctlError, UsageError
from tests.scripted import asked, one_after_the_other, played, source_of

CALCULATOR = """
    class Base:
        def reset(self, **row) -> None:
            self.row, self.calls = row, 0
            self.reward = 0.0

        def add(self, a: int, b: int) -> str:
            '''Adds.

            Args:
                a: The first number.
                b: The second number.
            '''
            self.calls += 1
            self.reward = 1.0
            return str(a + b)

    class Game(Base):
        async def double(self, number: float) -> float:
            '''Doubles a number.

            Args:
                number: What to double.
            '''
            self.calls += 1
            return 2 * number

        @staticmethod
        def names() -> list[str]:
            '''Lists names.'''
            return ["Ada", "Emmy"]

        def fails(self, text: str) -> str:
            '''Raises.

            Args:
                text: Of the error.
            '''
            raise ValueError(text)

        @property
        def public(self) -> str:
            raise AssertionError("a property is no tool")

        @classmethod
        def made(cls) -> str:
            raise AssertionError("a class method is no tool")

        def _private(self) -> None: ...

        def get_reward(self) -> float:
            return self.reward
"""


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def outputs(episode) -> list[str]:
    """What the policy read after its turns."""
    given = [str(message["content"]) for message in episode.messages if message["role"] != "assistant"]
    return given[1 - int(episode.metrics["num_turns"]) :]


@pytest.mark.parametrize(
    ("said", "answer", "errors"),
    [
        (call("add", a=2, b=3), "5", 0),
        (call("double", number=1.5), "3.0", 0),
        (call("names"), '["Ada", "Emmy"]', 0),
        (call("fails", text="no such page"), '{"error": "ValueError: no such page"}', 1),
        (call("add", a=2), "wrong arguments: b: Field required", 1),
        (call("add", a=2, b=3, c=3), "wrong arguments: c: Extra inputs", 1),
        (call("add", a="2", b=3), "wrong arguments: a: Input should be a valid integer", 1),
        (call("add", a=2.5, b=3), "wrong arguments: a: Input should be a valid integer", 1),
        (call("double", number="2"), "wrong arguments: number: Input should be a valid number", 1),
        ('<tool_call>{"name": "names", "arguments": ""}</tool_call>', '["Ada", "Emmy"]', 0),
        ('<tool_call>{"name": "names", "arguments": null}</tool_call>', '["Ada", "Emmy"]', 0),
        ('<tool_call>{"name": "names", "arguments": {"a": NaN}}</tool_call>', "must be JSON", 1),
        ('<tool_call>{"name": "names", "arguments": {"a": 1, "a": 2}}</tool_call>', "must be JSON", 1),
        (call("made"), "there is no tool made", 1),
        (call("_private"), "there is no tool _private", 1),
        (call("get_reward"), "there is no tool get_reward", 1),
        (call("reset"), "there is no tool reset", 1),
        ('<tool_call>{"name": "add", </tool_call>', "error", 1),
    ],
)
def test_the_policy_reads_what_its_call_returned_or_what_is_wrong_with_it(
    tmp_path: Path, said: str, answer: str, errors: int
) -> None:
    [episode], engine = played(tmp_path, CALCULATOR, one_after_the_other(said, "done"))
    assert (episode.error, episode.stop_reason, episode.response) == ("", "completed", "done")
    assert answer in outputs(episode)[0]
    assert answer in engine.read[1]
    assert engine.read[1].startswith(engine.read[0] + said + "<end>"), "nothing was encoded again"
    assert len(episode.sequences) == 1
    assert episode.metrics["tool_errors"] == errors
    assert episode.reward == float(said == call("add", a=2, b=3))


def test_all_tools_are_described_to_the_policy(tmp_path: Path) -> None:
    _, engine = played(tmp_path, CALCULATOR, one_after_the_other("done"))
    for name in ("add", "double", "names", "fails", "The first number."):
        assert f'"{name}"' in engine.read[0]
    for name in ("reset", "get_reward", "made", "public", "_private", "self"):
        assert f'"{name}"' not in engine.read[0]


def test_several_calls_in_one_turn_are_answered_in_order(tmp_path: Path) -> None:
    said = call("add", a=1, b=1) + call("nothing") + call("double", number=4)
    [episode], _ = played(tmp_path, CALCULATOR, one_after_the_other(said, "done"))
    text = "".join(str(m["content"]) for m in episode.messages[2:-1])
    assert text.index("2") < text.index("no tool nothing") < text.index("8")
    assert (episode.metrics["num_tool_calls"], episode.metrics["tool_errors"]) == (3, 1)


def test_the_number_of_tool_calls_is_limited(tmp_path: Path) -> None:
    said = one_after_the_other(call("add", a=1, b=1))
    [episode], _ = played(tmp_path, CALCULATOR, said, max_tool_calls=3, max_turns=9)
    assert (episode.stop_reason, episode.metrics["num_tool_calls"]) == ("max_tool_calls", 3)
    [episode], _ = played(tmp_path, CALCULATOR, said, max_turns=4)
    assert (episode.stop_reason, episode.metrics["num_turns"], episode.reward) == ("max_turns", 4, 1.0)


ROW = {"level": 3, "hint": "x"}
PROMPT = [{"role": "user", "content": "go"}]


@pytest.mark.parametrize(
    ("signature", "received"),
    [
        ("level", {"level": 3}),
        ("level, unknown=5", {"level": 3, "unknown": 5}),
        ("hint, ground_truth", {"hint": "x", "ground_truth": "secret"}),
        (
            "**row",
            {"level": 3, "hint": "x", "data_source": "mine", "prompt": PROMPT},
        ),
        ("level, **row", {"level": 3, "hint": "x", "data_source": "mine"}),
        ("", {}),
    ],
)
def test_reset_receives_what_it_names_and_never_the_ground_truth_unasked(
    tmp_path: Path, signature: str, received: dict[str, object]
) -> None:
    code = f"""
    class Game:
        def reset(self, {signature}):
            return " " + repr(sorted(({{**locals(), **locals().get("row", {{}})}}).items(), key=str))
    """
    task = asked(extra_info=ROW, ground_truth="secret", data_source="mine")
    [episode], engine = played(tmp_path, code, one_after_the_other("done"), [task])
    assert episode.error == ""
    shown = engine.read[0]
    assert ("secret" in shown) == ("ground_truth" in signature)
    for key, value in received.items():
        assert f"('{key}', {value!r})" in shown
    assert "<|user|>go [" in shown, "appended to the last message of the user"


def test_every_episode_has_an_instance_of_its_own(tmp_path: Path) -> None:
    code = """
    class Game:
        count = 0

        def reset(self) -> None: ...

        def next(self) -> int:
            '''Counts.'''
            Game.count += 1
            return Game.count
    """
    found, _ = played(tmp_path, code, one_after_the_other(call("next"), call("next"), "done"), n=3)
    assert [outputs(episode) for episode in found] == [["1", "2"]] * 3
    assert {episode.reward for episode in found} == {None}, "it gives none"


RESPONDS = """
    class Game:
        def reset(self, secret) -> None:
            self.secret, self.won, self.done = secret, False, False

        def respond(self, text: str) -> str | None:
            self.won = int(text) == self.secret
            return None if self.won else "higher" if int(text) < self.secret else "lower"

        def get_reward(self) -> float:
            return self.won
"""


def test_an_environment_may_speak_as_the_user(tmp_path: Path) -> None:
    task = asked(extra_info={"secret": 5})
    [episode], _ = played(tmp_path, RESPONDS, one_after_the_other("3", "7", "5"), [task])
    assert outputs(episode) == ["higher", "lower"]
    assert (episode.stop_reason, episode.reward, episode.metrics["num_turns"]) == ("completed", 1.0, 3.0)
    [episode], _ = played(tmp_path, RESPONDS, one_after_the_other("3"), [task], max_turns=4)
    assert (episode.stop_reason, episode.reward, episode.metrics["num_turns"]) == ("max_turns", 0.0, 4.0)


def test_what_the_policy_wrote_never_excludes_an_episode(tmp_path: Path) -> None:
    """Otherwise it would learn to make its failures disappear."""
    task = asked(extra_info={"secret": 5})
    [episode], _ = played(tmp_path, RESPONDS, one_after_the_other("five", "5"), [task])
    assert "ValueError" in outputs(episode)[0]
    assert (episode.error, episode.reward, episode.metrics["tool_errors"]) == ("", 1.0, 1.0)


def test_an_environment_may_end_after_a_tool_call(tmp_path: Path) -> None:
    code = """
    class Game:
        done = False

        def reset(self) -> None: ...

        def submit(self, answer: str) -> str:
            '''Ends.

            Args:
                answer: The answer.
            '''
            self.done = True
            return "thanks"

        def get_reward(self):
            import fractions
            return fractions.Fraction(1, 2)
    """
    [episode], engine = played(tmp_path, code, one_after_the_other(call("submit", answer="4")))
    assert (episode.stop_reason, episode.reward, len(engine.read)) == ("tool_stopped", 0.5, 1)


BAD = """
    import os, time

    class Game:
        def reset(self, how="") -> None:
            if how == "reset raises":
                raise ConnectionError("refused")
            if how == "reset hangs":
                time.sleep(60)
            self.how = how

        def hang(self) -> str:
            '''Hangs.'''
            time.sleep(60)

        def end(self) -> str:
            '''Ends the process.'''
            os._exit(3)

        def leave(self) -> str:
            '''Ends as a program does.'''
            raise SystemExit(3)

        def shout(self) -> str:
            '''Prints and returns far too much.'''
            for _ in range(1000):
                print("x" * 1_000_000)
            return "y" * 100_000_000

        def get_reward(self):
            if self.how == "reward raises":
                raise ConnectionError("refused")
            return {"no reward": None, "text": "1.0", "nan": float("nan")}.get(self.how, 1.0)
"""


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("reset raises", "reset raised ConnectionError: refused"),
        ("reset hangs", "reset took longer than"),
        ("reward raises", "get_reward: ConnectionError: refused"),
        ("no reward", "it returned no number"),
        ("text", "it returned no number"),
        ("nan", "not finite"),
    ],
)
def test_a_fault_of_the_class_excludes_the_episode(tmp_path: Path, how: str, named: str) -> None:
    tasks = [asked(0, extra_info={"how": how}), asked(1)]
    found, _ = played(tmp_path, BAD, one_after_the_other("done"), tasks, tool_timeout="0.5s")
    assert named in found[0].error
    assert found[0].reward is None
    assert (found[1].error, found[1].reward) == ("", 1.0)


@pytest.mark.parametrize(("tool", "text"), [("hang", "timed out after 0.5s"), ("end", "process")])
def test_a_tool_that_hangs_or_ends_its_process_is_text_for_the_policy(
    tmp_path: Path, tool: str, text: str
) -> None:
    said = one_after_the_other(call(tool), call(tool), "done")
    [episode], _ = played(tmp_path, BAD, said, tool_timeout="0.5s")
    assert (episode.error, episode.stop_reason) == ("", "completed")
    assert text in outputs(episode)[0]
    assert "does not answer any more" in outputs(episode)[1]
    assert (episode.reward, episode.metrics["tool_errors"]) == (0.0, 2.0)


def test_a_tool_that_exits_or_returns_too_much_is_text_too(tmp_path: Path) -> None:
    said = one_after_the_other(call("leave"), call("shout"), "done")
    [episode], _ = played(tmp_path, BAD, said, tool_timeout="60s", max_tool_output=50)
    left, shouted = outputs(episode)
    assert "SystemExit" in left
    assert "y" * 50 in shouted
    assert len(shouted) < 100
    assert episode.reward == 1.0


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("class Game:\n    pass", "no method `reset`"),
        ("class Game:\n    def reset(self): ...\n    def tool(self, x): ...", "tool tool has no schema"),
        ("Game = 3", "Game"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(tmp_path: Path, code: str, named: str) -> None:
    with pytest.raises((UsageError, ValueError), match=named):
        played(tmp_path, code, one_after_the_other("done"))


def test_a_file_that_ends_the_process_at_its_import_is_refused(tmp_path: Path) -> None:
    code = """
    import os
    if "PYTEST_CURRENT_TEST" not in os.environ:
        os._exit(1)

    class Game:
        def reset(self): ...
    """
    with pytest.raises(RlctlError, match="cannot be imported"):
        played(tmp_path, code, one_after_the_other("done"))


def test_a_class_reads_only_the_variables_that_the_spec_names(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SECRET_ONE", "1")
    monkeypatch.setenv("SECRET_TWO", "2")
    code = """
    import os

    class Game:
        def reset(self):
            return " ".join(sorted(key for key in os.environ if key.startswith("SECRET")))
    """
    _, engine = played(tmp_path, code, one_after_the_other("done"), variables=["SECRET_TWO"])
    assert "SECRET_TWO" in engine.read[0]
    assert "SECRET_ONE" not in engine.read[0]


def test_a_row_chooses_among_the_environments_that_the_spec_lists(tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("class Other:\n    def reset(self):\n        return ' other'\n")
    code = "class Game:\n    def reset(self):\n        return ' game'\n"
    says = one_after_the_other("done")
    tasks = [asked(0), asked(1, environment="Other"), asked(2, environment="single_turn")]
    found, engine = played(
        tmp_path, code, says, tasks, others=[f"{other}:Other", "single_turn"], lockstep=True
    )
    assert [e.task.group_id for e in found] == [0, 1, 2]
    assert sorted(text.partition("go")[2][:6] for text in engine.read) == [" game<", " other", "<end><"]
    with pytest.raises(UsageError, match="chooses the environment"):
        played(tmp_path, code, says, [asked(0, environment="Other")])


def test_asynchronous_tools_share_one_loop(tmp_path: Path) -> None:
    """What one call opens, the next one uses."""
    code = """
    import asyncio

    class Game:
        def reset(self): ...

        async def open(self) -> str:
            '''Opens.'''
            self.loop = asyncio.get_running_loop()
            return "open"

        async def use(self) -> bool:
            '''Uses.'''
            return self.loop is asyncio.get_running_loop()
    """
    [episode], _ = played(tmp_path, code, one_after_the_other(call("open"), call("use"), "done"))
    assert outputs(episode) == ["open", "true"]


def test_the_source_ends_what_it_started(tmp_path: Path) -> None:
    source = source_of(tmp_path, "class Game:\n    def reset(self): ...\n")
    source.close()
    source.close()
