"""Separates a response's thoughts from what follows them; all built-in graders read only the latter."""

from __future__ import annotations

import re
from functools import lru_cache

from rlctl.lazy import lazy_pattern

#: Reasoning formats: the marks that open and close thoughts, as patterns. A harmony message is a thought in
#: every channel but `final`; its last row is the same text decoded without special tokens.
FORMATS = (
    (r"<think>", r"</think>"),
    (r"<thinking>", r"</thinking>"),
    (r"<thoughts?>", r"</thoughts?>"),
    (r"<reasoning>", r"</reasoning>"),
    (r"\[THINK\]", r"\[/THINK\]"),
    (r"<seed:think>", r"</seed:think>"),
    (r"◁think▷", r"◁/think▷"),
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (
        r"<\|channel\|>(?!\s*final)[^<>]*(?:<\|constrain\|>[^<>]*)?<\|message\|>",
        r"<\|channel\|>\s*final[^<>]*(?:<\|constrain\|>[^<>]*)?<\|message\|>",
    ),
    (r"\Aanalysis(?-i:(?=[A-Z]))", r"(?-i:assistantfinal)"),
)
_OPENING = "|".join(opening for opening, _ in FORMATS)
_MARKS = lazy_pattern(
    "|".join(f"(?P<open{n}>{pair[0]})|(?P<close{n}>{pair[1]})" for n, pair in enumerate(FORMATS)),
    re.IGNORECASE,
)
#: Lower-case letters of which each mark has at least one run.
_TRACES = ("think", "thought", "oning>", "channel|>", "assistantfinal", "analysis")
_OF_TEMPLATE = r"<[|｜][^<>|｜]+[|｜]>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>"
#: An opening mark in the last turn of a prompt that begins a line, follows a token of the chat template, or
#: follows "Answer:" and ends the prompt. A mark within a sentence, or before another turn, is part of an
#: instruction and opens nothing.
_BEGUN = lazy_pattern(
    r"(?:\A|(?<=[\n>\]▷])|(?<=assistant)|(?<=assistant:)|(?<=:)(?=[ \t]*\S+\s*\Z))[ \t]*"
    rf"(?:{_OPENING})(?!.*(?:{_OPENING}|{_OF_TEMPLATE}))",
    re.IGNORECASE | re.DOTALL,
)


def without_thoughts(response: str, prompt: str = "") -> str:
    """The text after the last thoughts; nothing if the response ends within them.

    Args:
        response: the text of a response, with special tokens if they mark its thoughts.
        prompt: as the policy reads it; many chat templates open the thoughts there.
    """
    thoughts = _open_at_end(prompt)
    if thoughts is None and _MARKS.search(response) is None:
        return response
    thoughts, end = _scan(response, thoughts)
    return "" if thoughts else response[end:]


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends within thoughts, which the response continues."""
    return _open_at_end(prompt) is not None


@lru_cache(maxsize=256)  # the responses to a prompt follow one another
def _open_at_end(prompt: str) -> str | None:
    """The format in which thoughts are open at the end of a prompt; None: they are not."""
    begun = _BEGUN.search(prompt)
    return _scan(prompt[begun.start() :], None)[0] if begun else None


def _scan(text: str, thoughts: str | None) -> tuple[str | None, int]:
    """The format in which thoughts are open at the end of a text, and the end of the last closing mark.

    `thoughts`: the format in which they are open at its start; None: they are not.
    """
    end = 0
    if not any(map(text.lower().__contains__, _TRACES)):  # cheaper than the search for marks
        return thoughts, 0
    for mark in _MARKS.finditer(text):
        kind = str(mark.lastgroup)
        if kind.startswith("open"):
            thoughts = thoughts or kind.removeprefix("open")
        elif thoughts in (None, kind.removeprefix("close")):
            thoughts = None
            end = mark.end()
    return thoughts, end
