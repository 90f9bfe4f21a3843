"""The audit of an environment names each fault, and nothing in a sound one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.batch import Task
from rlctl.environment.audit import EnvironmentAudit, audit_environment
from rlctl.environment.protocol import EnvironmentContext
from rlctl.environment.renderer import ChatRenderer
from rlctl.errors import UsageError
from rlctl.rollout.protocol import Sampling
from rlctl.run_spec.environment import EnvironmentSpec
from tests.unit.environment.templates import tokenizer_of

#: Environments whose rows have ground truths.
KNOWS_TRUTH = ("ShowsAnswer", "KeepsStateOnTheClass")
FILE = Path(__file__).with_name("broken.py")


def _audit(name: str, *, episodes: int = 16) -> EnvironmentAudit:
    tokenizer = tokenizer_of("chatml")
    renderer = ChatRenderer(tokenizer)
    tasks = []
    for word in ("banana", "cherry", "orange"):
        messages = ({"role": "user", "content": "Guess the word."},)
        text = renderer.text(messages)
        given = {"extra_info": {"word": word}, "ground_truth": word if name in KNOWS_TRUTH else ""}
        tasks.append(Task(renderer.encode(text), text, messages=messages, **given))  # type: ignore[arg-type]
    limit = "1s" if "Hang" in name else "10s"
    spec = EnvironmentSpec(name=f"{FILE}:{name}", max_turns=3, tool_timeout=limit)
    context = EnvironmentContext(spec, tokenizer, Sampling(128), 4096)
    return audit_environment(spec.name, context, tasks, episodes)


def test_a_sound_environment_has_no_finding() -> None:
    audit = _audit("Sound", episodes=200)
    assert audit.findings == []
    assert [len(played.episodes) for played in audit.played] == [50] * 4
    assert audit.tools[0]["function"]["name"] == "guess"
    assert [tool["function"]["parameters"]["required"] for tool in audit.tools] == [["word"]]


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("CannotBeCreated", "episodes_fail"),
        ("ResetRaises", "episodes_fail"),
        ("FlakyReset", "episodes_fail"),
        ("ResetHangs", "episodes_fail"),
        ("WantsAnotherColumn", "episodes_fail"),
        ("RewardIsText", "episodes_fail"),
        ("RewardRaises", "episodes_fail"),
        ("ResetDiffers", "reset_differs"),
        ("SwallowsFailure", "failure_scored"),
        ("RewardsSilence", "blind_scores"),
        ("RewardsEcho", "blind_scores"),
        ("NoReward", "no_reward"),
        ("ToolHangs", "tool_hangs"),
        ("ToolRaises", "tool_raises"),
        ("ToolEndsItsProcess", "tool_raises"),
        ("ToolSaysNothing", "tool_is_silent"),
        ("ToolSaysTooMuch", "tool_is_cut"),
        ("ShowsAnswer", "shows_answer"),
        ("NeverEnds", "never_ends"),
        ("ExcludedByThePolicy", "policy_excludes"),
        ("LeavesFiles", "leaves_files"),
        ("leaves_processes", "leaves_processes"),
    ],
)
def test_faults_are_named(name: str, finding: str) -> None:
    audit = _audit(name)
    assert [one.name for one in audit.findings] == [finding]
    failed = [e for played in audit.played for e in played.episodes if e.error]
    assert all(episode.reward is None for episode in failed)


@pytest.mark.parametrize("name", ["KeepsStateInTheModule", "KeepsStateOnTheClass", "BeginsOnce"])
def test_state_that_reaches_the_next_episode_is_found(name: str) -> None:
    audit = _audit(name)
    [finding] = [one for one in audit.findings if one.name == "state_leaks"]
    assert finding.severity == "critical"
    assert "in a process of its own" in finding.what


def test_state_that_changes_nothing_is_no_leak() -> None:
    assert _audit("CachesInTheModule").findings == []


@pytest.mark.parametrize(
    ("name", "match"), [("NoReset", "no method `reset`"), ("UntypedTool", "tool hint has no schema")]
)
def test_what_cannot_be_built_is_refused(name: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        _audit(name)
