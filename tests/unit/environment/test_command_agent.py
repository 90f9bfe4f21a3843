"""Agents that are command lines: what they are given, what becomes of how they end; and what is refused."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

from rlctl.batch import Episode
from rlctl.environment.build import build_environment
from rlctl.environment.protocol import EnvironmentContext
from rlctl.errors import UsageError
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.environment import EnvironmentSpec
from tests.scripted_engine import ScriptedEngine, chat_tokenizer
from tests.unit.environment.scripted import play_agent

#: Speaks each API without a library; `ask()` returns the reply.
START = """
import json, os, subprocess, sys, time, urllib.request
task = json.load(sys.stdin)
def ask(path="/chat/completions", body=None, root="OPENAI", header="Authorization", before="Bearer "):
    body = body or {"messages": task["prompt"]}
    request = urllib.request.Request(os.environ[root + "_BASE_URL"] + path, json.dumps(body).encode(),
        {header: before + os.environ[root + "_API_KEY"]})
    return json.load(urllib.request.urlopen(request))
"""


def play(
    tmp_path: Path, code: str, n: int = 1, arguments: str = "", **spec: Any
) -> tuple[list[Episode], ScriptedEngine]:
    """n episodes of a script, and the engine."""
    script = tmp_path / "agent with space.py"
    script.write_text(START + dedent(code))
    name = f"command:{sys.executable} -S '{script}' {arguments}"
    engine = ScriptedEngine(lambda _: "ok")
    return play_agent(name, engine, n, 20, **spec), engine


def test_it_reads_the_task_speaks_three_apis_and_prints_its_reward(tmp_path: Path) -> None:
    code = """
        user = task["prompt"]
        said = ask()["choices"][0]["message"]["content"]
        said += ask("/responses", {"input": user})["output"][0]["content"][0]["text"]
        body = {"messages": user, "max_tokens": 9}
        said += ask("/v1/messages", body, "ANTHROPIC", "x-api-key", "")["content"][0]["text"]
        key = os.environ["OPENAI_API_KEY"]
        hides = key not in open("/proc/self/cmdline").read() and "ground_truth" not in task
        print("words before the reward", said)
        row = (task["level"], task["data_source"]) == (3, "sums")
        print(0.25 * (said == "okokok") + 0.5 * hides + row, end=" \\n\\n")
    """
    episodes, engine = play(tmp_path, code, n=2, lockstep=True)
    assert [(episode.error, episode.reward, episode.stop_reason) for episode in episodes] == [
        ("", 1.75, "completed")
    ] * 2
    assert engine.batches[0] == 2  # side by side
    assert episodes[0].metrics["num_turns"] == 3


def test_arguments_and_the_ground_truth(tmp_path: Path) -> None:
    code = "ask(); print(float(sys.argv[1:] == ['a b', '--x']) + (task['ground_truth'] == '4'))"
    [episode], _ = play(tmp_path, code, arguments="'a b' --x", params={"ground_truth": True})
    assert (episode.error, episode.reward) == ("", 2.0)


@pytest.mark.parametrize(
    ("code", "reward", "stop_reason", "cause"),
    [
        ("ask()", None, "completed", ""),
        ("ask(); print('1.0 points')", None, "completed", ""),
        ("ask(); print('-2e-1\\r')", -0.2, "completed", ""),
        ("ask(); sys.stdout.buffer.write(b'\\xff\\n7')", 7.0, "completed", ""),
        ("ask(); print('x' * 3_000_000); print(1)", 1.0, "completed", ""),
        ("ask(); sys.stderr.write('e' * 3_000_000); print(1)", 1.0, "completed", ""),
        ("ask(); print('nan')", None, "environment_error", "neither a finite number nor None"),
        ("ask(); raise KeyError('score')", 0.0, "parse_error", ""),
        ("ask(); sys.exit(3)", 0.0, "parse_error", ""),
        ("ask(); sys.exit(75)", None, "environment_error", "temporary failure"),
        ("ask(); os.kill(os.getpid(), 9)", None, "environment_error", "signal"),
        ("ask(); ask(body={'messages': 7})", None, "environment_error", "400"),
        ("sys.exit('no search server')", None, "environment_error", "no search server"),
        ("print(os.environ['OPENAI_API_KEY'], file=sys.stderr); sys.exit(1)", None, "environment_error", "…"),
        ("[ask() for _ in range(9)]", 0.0, "max_turns", ""),
    ],
)
def test_how_it_ends(tmp_path: Path, code: str, reward: float | None, stop_reason: str, cause: str) -> None:
    [episode], _ = play(tmp_path, code)
    assert (episode.reward, episode.stop_reason) == (reward, stop_reason), episode.error
    assert cause in episode.error
    assert bool(cause) == bool(episode.error)


def test_what_it_started_ends_with_it_and_does_not_hold_it(tmp_path: Path) -> None:
    """A process in a session of its own, which keeps the output open and asks on after the reward."""
    code = """
        ask()
        child = ("import time, urllib.request\\n"
                 "while True:\\n"
                 "    time.sleep(0.01)\\n"
                 "    try: urllib.request.urlopen(%r)\\n"
                 "    except Exception: pass")
        child %= os.environ["OPENAI_BASE_URL"]
        started = subprocess.Popen([sys.executable, "-S", "-c", child], start_new_session=True)
        open(sys.argv[1], "w").write(str(started.pid))
        print(1.0)
    """
    pid_file = tmp_path / "pid"
    [episode], _ = play(tmp_path, code, arguments=f"'{pid_file}'")
    assert (episode.error, episode.reward, episode.metrics["num_turns"]) == ("", 1.0, 1.0)
    pid = int(pid_file.read_text())
    for _ in range(200):
        if not psutil.pid_exists(pid):
            break
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)


def test_it_ends_at_the_time_limit(tmp_path: Path) -> None:
    [episode], _ = play(tmp_path, "ask(); time.sleep(1000)", episode_timeout="2s")
    assert (episode.stop_reason, episode.reward) == ("timeout", 0.0)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("./missing.sh", "no program ./missing.sh"),
        ("no-such-program-of-this-name --x", "no program"),
        ("'", "cannot be read"),
        (" ", "empty"),
        (str(Path(__file__)), "may not be executed"),
        ("/", "no program"),
    ],
)
def test_a_command_that_cannot_run_is_refused(line: str, what: str) -> None:
    spec = EnvironmentSpec(name=f"command:{line}")
    context = EnvironmentContext(spec, chat_tokenizer(), Sampling(20), 400)
    with pytest.raises(UsageError, match=what):
        build_environment(spec.name, context)
