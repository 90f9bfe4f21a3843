"""Mathematical answers, read and compared by math-verify.

Where in a response the answer stands is `rlctl.reward.answer`'s business, and how numbers are written in
prose that of `rlctl.reward.numbers`; what an expression means and whether it equals the ground truth is
math-verify's. What is too large to be computed is compared as text, see `rlctl.reward.limits`. Nothing here
has a time limit, and not everything that takes sympy for ever is found from its text, so untrusted responses
go through `rlctl.reward.pool`.
"""

from __future__ import annotations

import logging
import re
from functools import cache, lru_cache
from typing import Any

from rlctl.reward.answer import MATHS, Place, places
from rlctl.reward.limits import is_too_large, written_form
from rlctl.reward.numbers import legible, measure, number_in, plain

ANSWER_MARK = "####"
BOX = "\\boxed"
_EQUALS = re.compile(r"(?<![<>!\\])=")
_SEVERAL = re.compile(r",(?!\d{3}(?!\d))|;|\b(?:and|or)\b")
_BOLD = re.compile(r"\*\*(?=[^*]*\d)([^*\n]+[^*\n:])\*\*")
_ASIDE = re.compile(r"(?<=\S)\s+\([^()]*\)[.\s]*$")
_COMMAND = re.compile(r"\\[A-Za-z]+\s*(?:\{[^{}]*\})?")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")


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
    """The answer as text: numbers by their value ("1/2" and "0.5" alike, percent without its sign), anything
    else as sympy prints it; None without one.
    """
    answers = _answers(response)
    if not answers:
        return None
    answer = answers[0]
    if getattr(answer, "is_Relational", False) and not answer.rhs.free_symbols:  # x = 5
        answer = answer.rhs
    if getattr(answer, "is_number", False):
        percent = _percent(answer)
        answer = answer.doit() if percent is None else percent
        answer = _sympy().nsimplify(answer, rational=True) if answer.has(_sympy().Float) else answer
    text: str = str(answer)
    return text


@lru_cache(maxsize=4096)  # the siblings of a prompt share one ground truth
def _gold(ground_truth: str) -> list[Any]:
    text = legible(ground_truth.rpartition(ANSWER_MARK)[2]).strip()
    gold = _readings(Place(text, is_whole=True)) or _parse(text)
    if not gold:
        raise ValueError(f"the ground truth {ground_truth[:200]!r} is not a mathematical expression")
    return gold


def _answers(response: str) -> list[Any]:
    """Readings of the first place that can be read."""
    return next(filter(None, map(_readings, places(response))), [])


def _readings(place: Place) -> list[Any]:
    return _whole(place.text) if place.is_whole else _prose(place.text)


def _whole(text: str) -> list[Any]:
    """Readings of a text that is all answer."""
    if number := _amount(text):
        return _parse(_boxed(number))
    shown = plain(text)
    if _SEVERAL.search(shown) and (several := _parse(_boxed(shown))):
        return several
    if _WORD.search(shown):  # a sentence in a box
        if number := number_in(shown, words=True):
            return _parse(_boxed(number))
        if re.search(r"\d", shown) or (len(_WORD.findall(text)) > 1 and "\\" not in text):
            return []  # no product of letters
    return _parse(_boxed(text.strip().strip("$")))


def _prose(sentence: str) -> list[Any]:
    """Readings of the number or formula that a sentence states."""
    bold = _BOLD.findall(sentence)
    if bold and (number := number_in(plain(bold[-1]))):
        return _parse(_boxed(number))
    formula = _formula(sentence)
    if formula and not _amount(formula) and re.search(r"[A-Za-z\[\](]", plain(formula)):
        return _parse(sentence) if formula != sentence else _parse(_boxed(sentence.strip().rstrip(".")))
    in_words = number_in(plain(sentence), words=True)
    return _parse(_boxed(in_words)) if in_words else []


def _amount(text: str) -> str | None:
    """The number of a text that says nothing else: "$18 per day", "x = 5", "20 + 6 = 26 apples"."""
    shown = _ASIDE.sub("", plain(text))
    result = shown if _SEVERAL.search(shown) else _EQUALS.split(shown)[-1]
    return measure(result)


def _formula(sentence: str) -> str | None:
    """The last formula of a sentence, or the whole of a sentence without words."""
    found = [next(filter(None, groups)) for groups in MATHS.findall(sentence)]
    found = [text for text in found if not _WORD.search(_COMMAND.sub("", text))]  # not "$5 and then $"
    if found:
        last: str = found[-1]
        return last
    return None if _WORD.search(plain(sentence)) else sentence


def _boxed(text: str) -> str:
    return f"{BOX}{{{text}}}"


def _parse(text: str) -> list[Any]:
    """What math-verify extracts; empty when nothing in the text is mathematics."""
    if not text.strip():
        return []
    if is_too_large(text):  # equal only to itself, as text
        return [written_form(text)]
    parsed: list[Any] = _library().parse(
        text, _targets(), fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
    )
    return parsed


def _percent(answer: Any) -> Any:
    """The number in front of a percent sign, which math-verify reads as a product; None for other numbers."""
    hundredth = _sympy().UnevaluatedExpr(_sympy().Rational(1, 100))
    return answer.as_independent(hundredth)[0] if answer.has(hundredth) else None


@cache
def _sympy() -> Any:
    import sympy  # type: ignore[import-untyped]

    return sympy


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
