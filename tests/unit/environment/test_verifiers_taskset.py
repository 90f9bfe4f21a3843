"""Tasksets of verifiers: a conversation and its reward by verifiers, the tokens by the recorder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.batch import Episode, Task
from rlctl.environment import build
from rlctl.environment.protocol import EnvironmentContext
from rlctl.environment.run_episodes import run_episodes
from rlctl.errors import UsageError
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.environment import EnvironmentSpec
from tests.scripted_engine import ScriptedEngine, chat_tokenizer

SAMPLING = Sampling(max_response_length=40)
TASKSET = """
import asyncio
import verifiers.v1 as vf

__all__ = ["Sums", "Talk"]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def is_right(self, trace) -> float:
        if self.data.answer == "broken":
            raise RuntimeError("no grader")
        if self.data.answer == "slow":
            await asyncio.sleep(100)
        return float(self.data.answer in (trace.branches[-1].messages[-1].content or ""))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for answer in ("4", "5", "broken", "slow"):
            limit = vf.TaskTimeout(scoring=0.2 if answer == "slow" else None)
            given = {"prompt": "2+2?", "system_prompt": "Add.", "timeout": limit}
            yield SumTask(Sum(answer=answer, **given), self.config.task)


class TalkConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Talk(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and "4" not in segment.last_reply:
                segment = await interaction.turn("Try again.")
"""


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="not installed") as caught:
        built("sums")
    assert caught.value.fix == "pip install 'rlctl[verifiers]'"


def built(taskset: str, **config: Any) -> Any:
    spec = EnvironmentSpec(name="verifiers", params={"taskset": taskset, "config": config}, max_turns=4)
    return build.build_environment("verifiers", EnvironmentContext(spec, chat_tokenizer(), SAMPLING, 400))


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("verifiers.v1")
    name = f"sums_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def play(name: str, rows: list[int], answer: Any) -> tuple[list[Episode], ScriptedEngine]:
    engine = ScriptedEngine(answer)
    members = [(Task([1], "", extra_info={"idx": row}), member) for member, row in enumerate(rows)]
    spec = EnvironmentSpec(max_turns=4, concurrency=64)
    return run_episodes(built(name), engine, members, SAMPLING, 1, spec, 400), engine


def test_a_conversation_is_one_sequence_with_the_rewards_of_verifiers(taskset: str) -> None:
    episodes, engine = play(taskset, [0, 1], lambda text: "4" if "Try again" in text else "3")
    assert [(e.error, e.reward, e.stop_reason) for e in episodes] == [
        ("", 1.0, "completed"),
        ("", 0.0, "completed"),
    ]
    for episode in episodes:
        [sequence] = episode.sequences
        text = engine.tokenizer.decode(sequence.token_ids)
        assert [m["content"] for m in episode.messages] == ["Add.", "2+2?", "3", "Try again.", "4"]
        assert text.endswith(
            "assistant\n3<|im_end|>\n<|im_start|>user\nTry again.<|im_end|>\n"
            "<|im_start|>assistant\n4<|im_end|>"
        )
        assert (
            sequence.token_ids[sequence.sampled].tolist()
            == engine.tokenizer("3<|im_end|>4<|im_end|>")["input_ids"]
        )


def test_an_episode_without_a_valid_score_is_excluded(taskset: str) -> None:
    """Verifiers calls one with a time-out of scoring `ok`, with reward 0."""
    episodes, _ = play(taskset, [2, 3], lambda _: "4")
    assert all(episode.error and episode.reward is None for episode in episodes)
    assert "no grader" in episodes[0].error


def test_thirty_two_at_once_and_a_limit_of_turns(taskset: str) -> None:
    episodes, engine = play(taskset, [0] * 32, lambda _: "3")
    assert [(e.error, e.stop_reason, e.reward) for e in episodes] == [("", "max_turns", 0.0)] * 32
    assert len(engine.turns) == 32 * 4


def test_a_wrong_name_or_number_is_an_error(taskset: str) -> None:
    with pytest.raises(UsageError, match=r"verifiers: .*not found"):
        built("no_such_taskset")
    [episode], _ = play(taskset, [7], lambda _: "4")
    assert "the taskset has 4 tasks" in episode.error


def test_a_taskset_that_verifiers_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hangman of TextArena, whose package finds its words on this machine."""
    pytest.importorskip("verifiers.v1")
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("textarena.core")
    corpus = tmp_path / "corpora" / "words"
    corpus.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (corpus / name).write_text("apple\ngrape\nlemon\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: None)
    spec = EnvironmentSpec(
        name="verifiers", params={"taskset": "textarena", "config": {"game": "Hangman-v0"}}
    )
    context = EnvironmentContext(spec, chat_tokenizer(), SAMPLING, 8000)
    environment = build.build_environment("verifiers", context)
    members = [(Task([1], "", extra_info={"idx": row}), 0) for row in range(2)]
    engine = ScriptedEngine(lambda _: "[e]")
    episodes = run_episodes(environment, engine, members, SAMPLING, 1, spec, 8000)
    assert [(e.error, len(e.sequences), "Hangman" in e.messages[1]["content"]) for e in episodes] == [
        ("", 1, True)
    ] * 2
    assert all(e.reward is not None and e.metrics["num_turns"] > 1 for e in episodes)
