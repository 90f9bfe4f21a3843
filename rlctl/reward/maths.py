"""Mathematical answers, read and compared by math-verify.

This module only chooses *where* in a response the answer stands; what it means and whether it equals
the ground truth is math-verify's business. Nothing here has a time limit: a response such as `9^9^9^9`
keeps sympy busy for ever, so untrusted responses go through `rlctl.reward.pool`.
"""

from __future__ import annotations

import logging
from functools import cache, lru_cache
from typing import Any

ANSWER_MARK = "####"
BOX = "\\boxed"
#: Characters read from where the answer is looked for; math-verify's patterns backtrack on long texts.
MAX_ANSWER_CHARS = 2000


def grade(response: str, ground_truth: str) -> float:
    """1.0 when the response's answer equals the ground truth, else 0.0 (also when it gives no answer).

    Raises:
        ValueError: the ground truth is no mathematical expression.
        Exception: whatever sympy raises on the response; such a sample is unjudged, not wrong.
    """
    gold = _gold(ground_truth)
    answers = _answers(response)
    if not answers:
        return 0.0
    return float(_library().verify(gold, answers, timeout_seconds=None, raise_on_error=True))


def answer_of(response: str) -> str | None:
    """The answer as text: numbers by their value, anything else as sympy prints it; None without one."""
    answers = _answers(response)
    return str(answers[0]) if answers else None


@lru_cache(maxsize=4096)  # the siblings of a prompt share one ground truth
def _gold(ground_truth: str) -> list[Any]:
    text = ground_truth.rpartition(ANSWER_MARK)[2].strip()
    gold = _parse(_boxed(text)) or _parse(text)
    if not gold:
        raise ValueError(f"the ground truth {ground_truth[:200]!r} is not a mathematical expression")
    return gold


def _answers(response: str) -> list[Any]:
    """Readings of the answer: after the last `####`, else the last box, else the end of the text."""
    mark = response.rfind(ANSWER_MARK)
    box = response.rfind(BOX)
    if box > mark:  # also where `####` is a Markdown heading and the answer is boxed below it
        return _parse(response[box : box + MAX_ANSWER_CHARS])
    if mark < 0:
        return _parse(response[-MAX_ANSWER_CHARS:])
    lines = response[mark + len(ANSWER_MARK) :].strip().splitlines()
    return _readings(lines[0][:MAX_ANSWER_CHARS]) if lines else []


def _readings(line: str) -> list[Any]:
    """A line that is all answer: read whole, and as prose where that leaves unknowns ("72 dollars")."""
    whole = _parse(_boxed(line))
    if whole and not any(getattr(reading, "free_symbols", None) for reading in whole):
        return whole
    return whole + _parse(line)


def _boxed(text: str) -> str:
    return f"{BOX}{{{text}}}"


def _parse(text: str) -> list[Any]:
    """What math-verify extracts; empty when nothing in the text is mathematics."""
    if not text.strip():
        return []
    parsed: list[Any] = _library().parse(
        text, _targets(), fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
    )
    return parsed


@cache
def _library() -> Any:
    """math-verify, imported on first use: it takes most of a second."""
    # It warns once that its own time limits are off. They are: they need the main thread, and cannot
    # interrupt integer arithmetic anyway.
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    import math_verify

    return math_verify


@cache
def _targets() -> list[Any]:
    library = _library()
    return [library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()]
