"""Finds state that an environment keeps from one episode of a process to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlctl.batch import Episode, Task

#: Plays tasks one after the other, each in a fresh process or all in the same one.
Play = Callable[[Sequence[Task], bool], list[Episode]]
#: Episodes that differ and are tried again, and how often.
_MOST_TRIED, _REPEATED = 2, 12
_SHOWN = 80


def state_leak(play: Play, tasks: Sequence[Task]) -> str:
    """How an episode differs if others were played in its process before; empty: not at all.

    The tasks are played once in fresh processes, and twice in a process that may have played others. An
    episode that differs is played in further fresh processes: one that differs there too is random.
    """
    numbered = [replace(task, group_id=place) for place, task in enumerate(tasks)]
    fresh = play(numbered, True)
    reused = play([*numbered, *numbered], False)
    pairs = [(fresh[place % len(numbered)], later) for place, later in enumerate(reused)]
    differing = [place for place, (alone, later) in enumerate(pairs) if _facts(alone) != _facts(later)]
    for place in differing[:_MOST_TRIED]:
        alone, later = pairs[place]
        again = play([numbered[place % len(numbered)]] * _REPEATED, True)
        if all(_facts(episode) == _facts(alone) for episode in again):
            return _difference(alone, later)
    return ""


def _facts(episode: Episode) -> dict[str, Any]:
    """What must not depend on earlier episodes."""
    return {
        "error": episode.error,
        "messages": [str(message["content"]) for message in episode.messages],
        "stop reason": episode.stop_reason,
        "reward": episode.reward,
        "response": episode.response,
    }


def _difference(alone: Episode, later: Episode) -> str:
    expected = _facts(alone)
    seen = _facts(later)
    for name, value in expected.items():
        if value == seen[name]:
            continue
        if name != "messages":
            return f"its {name} became {_short(seen[name])}, and {_short(value)} in a process of its own"
        pairs = zip(value, seen[name], strict=False)
        wrong = next(((own, text) for own, text in pairs if own != text), ("nothing", "a further message"))
        return f"it said {_short(wrong[1])}, and {_short(wrong[0])} in a process of its own"
    return ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
