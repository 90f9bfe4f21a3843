"""The adapters of games and of OpenEnv in examples/; with the packages themselves where installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlctl.batch import Episode, Task
from rlctl.environment.build import build_environment
from rlctl.environment.protocol import EnvironmentContext
from rlctl.environment.renderer import ChatRenderer
from rlctl.environment.run_episodes import run_episodes
from rlctl.processes import free_port
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.environment import EnvironmentSpec
from tests.scripted_engine import ScriptedEngine, chat_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"
SAMPLING = Sampling(max_response_length=60)


def play(name: str, answer: Callable[[str], str], row: dict[str, Any], **spec: Any) -> tuple[Episode, str]:
    """One episode, and the text of its sequence."""
    tokenizer = chat_tokenizer()
    messages = ({"role": "user", "content": "Play.\n"},)
    ids = ChatRenderer(tokenizer).encode(ChatRenderer(tokenizer).text(messages))
    truth = row.pop("ground_truth", "")
    task = Task(ids, "", messages=messages, extra_info=row, ground_truth=truth)
    given = EnvironmentSpec(**{"name": f"{EXAMPLES}/{name}", "max_turns": 12, "tool_timeout": "60s"} | spec)
    environment = build_environment(given.name, EnvironmentContext(given, tokenizer, SAMPLING, 4000))
    try:
        [episode] = run_episodes(environment, ScriptedEngine(answer), [(task, 0)], SAMPLING, 1, given, 4000)
    finally:
        environment.close()
    assert not episode.error
    [sequence] = episode.sequences
    return episode, tokenizer.decode(sequence.token_ids)


def real_or(stand_in: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Makes the package importable in other processes; returns whether it is the real one."""
    if importlib.util.find_spec(package.partition(".")[0]):
        return True
    file = tmp_path / f"{package.replace('.', '/')}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(stand_in))
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return False


GYMNASIUM = """
    class Count:
        def reset(self, seed):
            self.left = seed
            return f"{self.left} left", {}

        def step(self, action):
            self.left -= int(action)
            return f"{self.left} left", 0.5, self.left <= 0, False, {}

    def make(name):
        assert name == "Count-v0"
        return Count()
"""


def test_a_game_of_gymnasium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interface, by a game of our own; a move that raises is text for the policy."""
    (tmp_path / "gymnasium.py").write_text(textwrap.dedent(GYMNASIUM))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    moves = iter(["2", "two", "1"])
    episode, text = play("text_games.py:Gymnasium", lambda _: next(moves), {"game": "Count-v0", "seed": 3})
    assert (episode.reward, episode.stop_reason) == (1.0, "completed")
    assert re.search(
        r"Play.\n3 left.*2<.*1 left.*two<.*cannot be played: invalid literal.*1<", text, re.DOTALL
    )


TEXTARENA = """
    class Game:
        def reset(self, num_players, seed):
            self.secret, self.seen, self.state = seed, ["Guess."], self
            self.rewards = None

        def get_observation(self):
            seen, self.seen = [(-1, text, None) for text in self.seen], []
            return 0, [(0, "own move", None), *seen]

        def step(self, action):
            guess = int(action.strip("[]"))
            hint = "higher" if self.secret > guess else "lower"
            self.seen = [f"The target number is {hint}."]
            self.rewards = {0: 1} if guess == self.secret else None
            return guess == self.secret, {}

    def make(name):
        assert name == "GuessTheNumber-v0-raw"
        return Game()
"""


def test_a_game_of_textarena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that reads the hints finds the number."""
    real_or(TEXTARENA, "textarena", tmp_path, monkeypatch)

    def bisect(text: str) -> str:
        low, high = 0, 21
        for guess, hint in re.findall(r"\[(\d+)\]<\|im_end\|>.*?target number is (\w+)", text, re.DOTALL):
            low, high = (int(guess), high) if hint == "higher" else (low, int(guess))
        return f"[{(low + high) // 2}]"

    row = {"game": "GuessTheNumber-v0", "seed": 3}
    episode, text = play("text_games.py:TextArena", bisect, row)
    assert (episode.reward, episode.stop_reason) == (1.0, "completed")
    assert 1 <= episode.metrics["num_turns"] <= 6
    assert "own move" not in text


SKYRL_GYM = """
    class Env:
        def __init__(self, truth):
            self.truth = truth

        def init(self, prompt):
            return prompt, {}

        def step(self, action):
            is_right = action.endswith(self.truth)
            shown = [] if is_right else [{"role": "user", "content": "in the exact format"}]
            return {"observations": shown, "reward": float(is_right), "done": is_right, "metadata": {}}

    def make(name, env_config, extras):
        assert name == "gsm8k_multi_turn"
        return Env(extras["reward_spec"]["ground_truth"])
"""


def test_an_environment_of_skyrl_gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_or(SKYRL_GYM, "skyrl_gym", tmp_path, monkeypatch)
    row = {"game": "gsm8k_multi_turn", "ground_truth": "4"}
    episode, text = play(
        "text_games.py:SkyRLGym", lambda read: "#### 4" if "exact format" in read else "four", row
    )
    assert (episode.reward, episode.metrics["num_turns"]) == (1.0, 2.0)
    assert "ground_truth" not in text


SERVER = """
    import sys
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        message: str

    class Heard(Observation):
        text: str = ""

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, word="hello", **more):
            self.word = word
            return Heard(text=f"Say {word}.", done=False, reward=0.0)

        def step(self, action, timeout_s=None, **more):
            done = action.message == self.word
            return Heard(text=action.message, done=done, reward=1.0 if done else 0.25)

        @property
        def state(self):
            return State(episode_id="1", step_count=0)

    app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""

OPENENV = """
    from types import SimpleNamespace

    class GenericEnvClient:
        def __init__(self, base_url, max_message_size_mb):
            assert base_url.startswith("http://127.0.0.1")

        def sync(self):
            return self

        def connect(self):
            return self

        def reset(self, word):
            self.word = word
            return SimpleNamespace(observation={"text": f"Say {word}."}, reward=0.0, done=False)

        def step(self, action):
            if "message" not in action:
                raise RuntimeError("Server error: message: Field required")
            done = action["message"] == self.word
            reward = 1.0 if done else 0.25
            return SimpleNamespace(observation={"text": action["message"]}, reward=reward, done=done)
"""


@pytest.fixture
def openenv_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    if not real_or(OPENENV, "openenv.core", tmp_path, monkeypatch):
        yield url
        return
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    with subprocess.Popen([sys.executable, str(script), str(port)]) as server:
        try:
            while not _is_up(url):
                assert server.poll() is None
                time.sleep(0.2)
            yield url
        finally:
            server.kill()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


def test_an_environment_of_openenv(openenv_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_URL", openenv_url)
    moves = iter(["hello", '{"word": "hi"}', '{"message": "no"}', json.dumps({"message": "hi"})])
    episode, text = play(
        "openenv_client.py:OpenEnv",
        lambda _: next(moves),
        {"reset": {"word": "hi"}},
        variables=["OPENENV_URL"],
    )
    assert (episode.reward, episode.stop_reason, episode.metrics["num_turns"]) == (1.25, "completed", 4.0)
    assert "Say hi." in text
    assert "JSON object" in text
    assert "Server error" in text
