"""An agent function in a user's file: what becomes of what it does, and what it sees."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rlctl.batch import Episode
from rlctl.errors import UsageError
from rlctl.rollout.hf import HFRollout
from rlctl.run_spec.environment import EnvironmentSpec, environments_without_reward
from tests.models import tiny_model
from tests.scripted_engine import ScriptedEngine, chat_tokenizer
from tests.unit.environment.scripted import play_agent

AGENTS = Path(__file__).with_name("agents.py")
OFFICIAL_CLIENT = Path(__file__).with_name("official_client.py")


def play(
    agent: str, n: int = 1, engine: Any = None, length: int = 20, **spec: Any
) -> tuple[list[Episode], Any]:
    """n episodes of the agent, a function of `agents.py` or with its file, and the engine."""
    engine = engine or ScriptedEngine(lambda _: "ok")
    name = agent if ":" in agent else f"{AGENTS}:{agent}"
    return play_agent(name, engine, n, length, **spec), engine


def test_an_agent_returns_a_score_or_leaves_it_to_the_graders() -> None:
    [scored], _ = play("scores")
    [unscored], _ = play("asks_twice")
    assert (scored.reward, unscored.reward) == (1.5, None)
    for episode in (scored, unscored):
        assert (episode.error, episode.stop_reason, episode.response) == ("", "completed", "ok")
        assert (len(episode.sequences), episode.metrics["num_turns"]) == (1, 2.0)
        assert [m["role"] for m in episode.messages] == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("agent", "reward"),
    [
        *[("plain", 3.0), ("Asks", 2.5), ("AsksAsync", 4.0), ("AsksStatic", 2.0)],
        *[("an_object", 3.0), ("an_async_object", 4.0), ("a_partial", 5.0), ("a_lambda", 2.0)],
        ("a_bound_method", 5.0),
    ],
)
def test_an_agent_may_be_a_plain_function_or_a_class(agent: str, reward: float) -> None:
    """Episodes block beside each other: in lockstep all must have asked before any is answered."""
    episodes, engine = play(agent, n=3, lockstep=True)
    assert [(episode.error, episode.reward) for episode in episodes] == [("", reward)] * 3
    assert engine.batches[0] == 3
    assert environments_without_reward(EnvironmentSpec(name=f"{AGENTS}:{agent}")) == []


def test_blocking_agents_do_not_hold_each_other() -> None:
    """In lockstep all must have asked before any is answered."""
    episodes, engine = play("blocks", n=8, lockstep=True)
    assert engine.batches == [8]
    assert [episode.reward for episode in episodes] == [2.0] * 8


def test_sixty_four_agents_at_once_on_a_model() -> None:
    """Sequences hold what the model sampled: their log-probs are the model's."""
    pytest.importorskip("openai")
    tokenizer = chat_tokenizer()
    model = tiny_model("llama", vocabulary=len(tokenizer))
    model.config.max_position_embeddings = 400
    engine = HFRollout(model, tokenizer, "cpu")
    episodes, _ = play(f"{OFFICIAL_CLIENT}:asks_twice", n=64, engine=engine, length=6)
    assert [(episode.error, episode.metrics["num_turns"]) for episode in episodes] == [("", 2.0)] * 64
    assert len({tuple(e.sequences[0].token_ids.tolist()) for e in episodes}) > 32
    for sequence in (s for episode in episodes[:8] for s in episode.sequences):
        with torch.no_grad():
            logits = model.eval()(sequence.token_ids[None]).logits[0, :-1].float()
        scored = logits.log_softmax(-1).gather(1, sequence.token_ids[1:, None])[:, 0]
        torch.testing.assert_close(scored[sequence.sampled[1:]], sequence.log_probs, atol=1e-4, rtol=0)


def test_an_agent_that_asks_on_after_its_reward_keeps_it() -> None:
    episodes, _ = play("calls_on", n=3)
    assert [(e.error, e.reward, e.stop_reason) for e in episodes] == [("", 1.0, "completed")] * 3


def test_an_agent_may_be_a_program() -> None:
    [episode], _ = play("starts_a_program")
    assert (episode.reward, episode.num_sampled) == (1.0, 3)


def test_an_agent_sees_the_variables_that_the_spec_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "AGENT_TEST_SECRET", "s")
    monkeypatch.setitem(os.environ, "AGENT_TEST_KEY", "k")
    [episode], _ = play("sees_the_secret", variables=["AGENT_TEST_KEY"])
    assert episode.reward == 2.0


@pytest.mark.parametrize(
    ("agent", "cause"),
    [
        ("raises_at_once", "ConnectionRefusedError: no search server"),
        ("reads_its_own_json", "JSONDecodeError"),
        ("raises_later", "ConnectionRefusedError: no search server"),
        ("ends_its_process", "ended"),
        ("returns_text", "returned good, neither"),
        ("returns_nan", "returned NaN, neither"),
        ("never_asks", "sampled nothing"),
    ],
)
def test_a_failing_agent_is_excluded_with_its_cause(agent: str, cause: str) -> None:
    """It has no reward instead of 0."""
    [episode], _ = play(agent)
    assert cause in episode.error
    assert agent == "never_asks" or (episode.reward, episode.stop_reason) == (None, "environment_error")


def test_a_hanging_agent_ends_with_its_episode() -> None:
    [episode], _ = play("hangs", episode_timeout="3s")
    assert (episode.stop_reason, episode.reward) == ("timeout", 0.0)


def test_a_limit_is_an_outcome_although_the_agent_raises() -> None:
    """Otherwise the policy would learn to exclude what it does badly."""
    [episode], engine = play("goes_on", max_turns=3)
    assert (episode.error, episode.stop_reason, episode.reward) == ("", "max_turns", 0.0)
    assert (episode.response, len(engine.turns)) == ("ok", 3)


def test_what_the_policy_wrote_does_not_exclude_an_episode() -> None:
    """The agent raises on text that it cannot read."""
    [wrong], _ = play("reads_json")
    [right], _ = play("reads_json", engine=ScriptedEngine(lambda _: '{"score": 0.5}'))
    assert (wrong.error, wrong.stop_reason, wrong.reward) == ("", "parse_error", 0.0)
    assert (right.error, right.stop_reason, right.reward) == ("", "completed", 0.5)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("takes_less", "called with three arguments"),
        ("plain_takes_less", "called with three arguments"),
        ("TakesLess", "called with three arguments"),
        ("NeedsAnArgument", "created without arguments"),
        ("yields", "does not yield"),
        ("yields_async", "does not yield"),
        ("yielding_object", "does not yield"),
        ("partial_that_lacks", "called with three arguments"),
        ("positional_only", "called with three arguments"),
        ("Callable", "no method `reset`"),
    ],
)
def test_an_agent_of_another_form_is_refused(agent: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        play(agent)


@pytest.mark.parametrize("name", ["a_number", "a_list", "not_there"])
def test_what_cannot_be_called_is_refused_by_the_spec(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not a function|no such function"):
        EnvironmentSpec(name=f"{AGENTS}:{name}")
