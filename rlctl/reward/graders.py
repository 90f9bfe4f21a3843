"""Graders that compare texts: the whole text, the letter of an option, an equation.

A grader is a function (response, ground_truth) → score, or a `Scorer` class with the constructor arguments
(section `reward`, device). It is registered where it is defined; the others are in `maths.py`, `code.py`,
`model.py` and `build.py`, and `rlctl.registry.GRADERS` lists these modules.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from functools import lru_cache

from rlctl.lazy import lazy_pattern
from rlctl.registry import GRADERS
from rlctl.reward.answer import Place, places
from rlctl.reward.numbers import SIGNS, calculate, plain
from rlctl.reward.options import chosen_option
from rlctl.reward.protocol import KnownResponses, any_accepted


@GRADERS.register(
    "exact",
    label="the same text",
    formula="1 if the response, stripped of white space at both ends, equals the ground truth, else 0",
    answer_of=lambda response: response.strip() or None,
    score_range=(0.0, 1.0),
    data_sources=r"embedded/addition",
    in_process=True,
)
@any_accepted
def exact(response: str, ground_truth: str) -> float:
    """1.0 when the texts are equal, ignoring white space at both ends, else 0.0."""
    return float(response.strip() == ground_truth.strip())


#: An option at the start of a ground truth: `B`, `(B)`, `B. 26`, `b) 26`.
_OPTION = lazy_pattern(r"[\s*_({\[]*(?:([A-J])|([a-j])(?=[).]))(?:[\s)\]}.:*_,]+|$)")


@GRADERS.register(
    label="the letter of an option",
    formula="1 if the response chooses the ground truth's option, else 0",
    needs={"a ground truth such as `B` or `B. 26`"},
    answer_of=chosen_option,
    known_responses=lambda ground_truth: (ground_truth, None),
    score_range=(0.0, 1.0),
    data_sources=r"multiple_choice|mmlu|gpqa|arc|hellaswag|commonsense_?qa|openbook_?qa|aqua|aqua_rat|sciq|medmcqa",
)
@any_accepted
def multiple_choice(response: str, ground_truth: str) -> float:
    """1.0 when the response chooses the ground truth's option, else 0.0.

    Raises:
        ValueError: the ground truth does not start with a letter from A to J.
    """
    option = _OPTION.match(ground_truth)
    if option is None:
        raise ValueError(
            f"the ground truth {ground_truth[:200]!r} does not begin with the letter of an option"
        )
    return float(chosen_option(response) == (option[1] or option[2]).upper())


#: Maximum characters of an equation that are read.
MAX_EQUATION_CHARS = 1000
#: A product without its sign, or with a letter for it: 4(25-3), 4 x 5.
_PRODUCT = lazy_pattern(r"(?<=[\d)])\s*(?:x\s*(?=[\d(])|(?=\())")
_OPERATION = lazy_pattern(r"[\d)]\s*[-+*/]")
_CLAUSE_END = lazy_pattern(r"[.;,](?=\s)|\n|\b(?:or|and|then|so)\b", re.IGNORECASE)
_OR = lazy_pattern(r"\b(?:or|alternatively)\b", re.IGNORECASE)
_ARITHMETIC = lazy_pattern(r"[\d+\-*/(). ]*\d[\d+\-*/(). ]*")


def equation_of(response: str) -> str | None:
    """The response's equation without white space; None when it has none."""
    found = filter(None, map(_equation, places(response)))
    return next((equation.replace(" ", "") for equation in found), None)


def _known_responses(ground_truth: str) -> KnownResponses:
    countdown_task(ground_truth)
    return None, None


@GRADERS.register(
    label="an equation that equals a target",
    formula="1 if the response's equation uses each number once and equals the target, else 0",
    source="Gandhi et al. 2024, arXiv 2404.03683",
    needs={'a ground truth such as `{"numbers": [25, 3, 4], "target": 88}`'},
    answer_of=equation_of,
    known_responses=_known_responses,
    score_range=(0.0, 1.0),
    data_sources=r"countdown\w*",
)
@any_accepted
def countdown(response: str, ground_truth: str) -> float:
    """1.0 when the response's equation uses each number once and makes the target, else 0.0.

    The equation may end with "= 24"; the ground truth is `{"numbers": [2, 3, 4], "target": 24}`.

    Raises:
        ValueError: the ground truth does not have this form.
    """
    expected, target = countdown_task(ground_truth)
    for place in places(response):
        equation = _equation(place)
        if equation is None:
            continue
        numbers: list[Fraction] = []
        return float(calculate(equation, numbers) == target and sorted(numbers) == expected)
    return 0.0


@lru_cache(maxsize=1024)  # the responses to a prompt share one ground truth
def countdown_task(ground_truth: str) -> tuple[list[Fraction], Fraction]:
    """Parses a ground truth: the numbers in ascending order, and the target.

    Raises:
        ValueError: it is not `{"numbers": […], "target": …}` in JSON.
    """
    values = json.loads(ground_truth, parse_float=Fraction)
    try:
        return sorted(map(Fraction, values["numbers"])), Fraction(values["target"])
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f'the ground truth is not {{"numbers": […], "target": …}}: {error!r}') from None


def _equation(place: Place) -> str | None:
    """The arithmetic expression that a place states last; None if there is none, or if it offers several.

    Of a clause with equals signs it is the first side with an operator, otherwise the first side with a
    number; nothing if the sides have different values.
    """
    shown = _PRODUCT.sub("*", plain(place.text).translate(SIGNS)[:MAX_EQUATION_CHARS])
    clauses = [clause for clause in _CLAUSE_END.split(shown) if _OPERATION.search(clause)]
    if len(clauses) > 1 and _OR.search(shown):
        return None
    sides = [_ARITHMETIC.findall(side) for side in (clauses[-1] if clauses else shown).split("=")]
    texts = [text.lstrip(" .").rstrip(" .(+-*/") for side in sides for text in side]
    equation = next((text for text in texts if _OPERATION.search(text)), texts[0] if texts else None)
    values = {calculate(side[0].strip(" .")) for side in sides[1:] if side}
    is_true = not values or values == {calculate(equation or "")}
    return equation if is_true else None
