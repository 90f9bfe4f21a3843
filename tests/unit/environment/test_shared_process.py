"""Episodes of async methods share a process by a key; what one of them does to it reaches no other one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.batch import Episode
from rlctl.errors import UsageError
from tests.scripted import asked, one_after_the_other, played

CODE = """
    import asyncio, os, pathlib, time
    HERE = 0

    class Game:
        async def reset(self, what, number) -> None:
            global HERE
            self.what, self.number, self.is_right = what, number, False
            HERE += 1
            for _ in range(500):  # until the others have begun, in the same process
                if HERE >= 4:
                    break
                await asyncio.sleep(0.01)
            self.here = HERE

        async def respond(self, text: str) -> str | None:
            self.is_right = text == "done"
            if self.what == "waits":
                await asyncio.sleep(1000)
            if self.what == "blocks":
                time.sleep(1000)
            if self.what == "dies":
                os._exit(3)
            if self.what == "raises":
                raise ValueError("no")
            await asyncio.sleep(0.3)
            return None

        async def get_reward(self) -> float:
            if self.what == "fails":
                raise RuntimeError("no reward")
            return self.is_right + self.here / 10
"""


def play(folder: Path, *kinds: str, code: str = CODE, **spec: object) -> list[Episode]:
    tasks = [asked(number, extra_info={"what": kind, "number": number}) for number, kind in enumerate(kinds)]
    given = {"episodes_per_process": 4, "tool_timeout": "2s", "max_turns": 2} | spec
    found, _ = played(folder, code, one_after_the_other("done"), tasks, **given)
    return found


def test_episodes_are_in_one_process_with_an_instance_each(tmp_path: Path) -> None:
    found = play(tmp_path, *["whole"] * 8)
    assert [(e.error, e.reward, e.stop_reason) for e in found] == [("", 1.4, "completed")] * 8


@pytest.mark.parametrize(
    ("kind", "reward", "answer"),
    [
        ("waits", 0.0, "timed out"),
        ("blocks", 0.0, "timed out"),
        ("dies", 0.0, "ended in respond"),
        ("raises", 1.1, "ValueError"),
        ("fails", None, "no reward"),
    ],
)
def test_an_episode_that_spoils_the_process_spoils_no_other_one(
    tmp_path: Path, kind: str, reward: float | None, answer: str
) -> None:
    code = CODE.replace("range(500)", "range(100)")
    found = play(tmp_path, "whole", kind, "whole", "whole", code=code)
    for whole in (found[0], *found[2:]):
        assert (whole.error, whole.stop_reason) == ("", "completed")
        assert whole.reward in (1.4, 1.1), "with the others, or alone"
        assert whole.metrics["num_turns"] == 1.0, "its tokens are those of one play"
    spoiled = found[1]
    said = spoiled.error + " ".join(str(message["content"]) for message in spoiled.messages)
    assert answer in said or (kind in {"waits", "blocks", "dies"} and spoiled.reward == 0.0)
    if reward is None:
        assert (spoiled.reward, spoiled.stop_reason) == (None, "environment_error")
    elif kind != "raises":
        assert (spoiled.error, spoiled.reward) == ("", reward)


def test_plain_methods_cannot_share(tmp_path: Path) -> None:
    code = CODE.replace("async def get_reward", "def get_reward")
    with pytest.raises(UsageError, match="get_reward is not"):
        play(tmp_path, "whole", code=code)
