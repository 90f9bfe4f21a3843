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

from rlctl.registry import GRADERS
from rlctl.reward.answer import Place, own_part, places, sentence_around
from rlctl.reward.assertion import asserted_part, in_languages, is_asserted
from rlctl.reward.numbers import SIGNS, calculate, plain
from rlctl.reward.protocol import KnownResponses


@GRADERS.register(
    "exact",
    label="the same text",
    formula="1 if the response, stripped of white space at both ends, equals the ground truth, else 0",
    answer_of=lambda response: response.strip() or None,
    data_sources=r"embedded/addition",
    in_process=True,
)
def exact(response: str, ground_truth: str) -> float:
    """1.0 when the texts are equal, ignoring white space at both ends, else 0.0."""
    return float(response.strip() == ground_truth.strip())


#: An option at the start of a ground truth: `B`, `(B)`, `B. 26`, `b) 26`.
_OPTION = re.compile(r"[\s*_({\[]*(?:([A-J])|([a-j])(?=[).]))(?:[\s)\]}.:*_,]+|$)")
#: Text after a letter that is not one of several: "A or B", "A, B, and C".
_ONE = r"(?!(?:\)?\s*+(?:,?\s*+(?:or|and)\b|[,/&])\s*+\(?[A-J]\b\)?){1,9}+[ \t.;}*_$]*+(?:\n|$))"
#: All quantifiers are possessive: after "answer" and a thousand blanks, backtracking would not finish.
_LETTER = (
    r"(?:[\s*_\"'({\[$`]|\\[(\[])*+(?:\\(?:text\w*|math\w+)\s*\{)?[\s*_(]*+"
    r"(?:(?!I\s+[a-z])([A-J])(?!'?\w|\s*+[=^_+/])|([a-j])\)|([b-hj])(?=[.*_\"'`]*+(?:\n|$)))"
    + _ONE  # "the answer I choose" names no option
)
_IS = (
    r"[\s*_\"']*+(?:(?i:is|was|(?:would|should|must|seems to|appears to) be)\b"
    r"(?:\s++(?i:indeed|therefore|thus|hence|clearly|likely|most likely|probably))?[\s*_\"']*+[:=]?|[:=→–-])"
)
#: Patterns of an option, the most reliable first; the last match of a pattern is used. In order: an option
#: named as the answer, an option that is chosen or called correct, an option that is mentioned ("option A is
#: wrong" may follow the answer), a line that starts with an option, an option in brackets, only a letter.
_IN_WORDS = (
    re.compile(
        rf"(?:\\(?:boxed|fbox)(?:\s*\{{|\s++|(?=\\))|####+|<answer>"
        rf"|\b(?i:(?:answers?|antwort|choice|option|letter|solution|selection|correct)\b{_IS}|answers?\b)"
        rf"[\s*_\"']*+(?i:option|choice|letter)?|(?i:{in_languages('answer')})(?:{in_languages('is')}|[\s:])*+|选(?!项)择?[\s:]*+){_LETTER}"
    ),
    re.compile(
        rf"(?<!not )(?<!n't )\b(?i:choose|select|pick|go with|must be)\b{_LETTER}"
        r"|\b([A-J])[)*_]*\s++is\s++(?:(?:the|my)\s++)?(?i:correct|right|best|answer)\b"
        r"|\b(?i:so|thus|hence|therefore|it's|it is),?\s++[*_(]*+([A-J])[*_). \t]*+(?:\n|$)"
    ),
    re.compile(rf"\b(?i:choice|option)\b{_LETTER}"),
)
_BY_PLACE = (
    re.compile(r"^[ \t*_(\[]*(?:([A-J])[ \t*_]*(?:[).:\]]|$)|([a-j])\))(?![^\n]*\([B-J]\))", re.MULTILINE),
    re.compile(rf"(?<!or )(?<!and )\(([A-J])\){_ONE}"),
    re.compile(r"^\W*([A-Ja-j])\W*$"),
)
#: The value of an option, between its letter and what is said about it.
_VALUE = re.compile(r"^\W*\d[\d.,/]*")
_CAPITAL = re.compile(r"\b[A-J]\b")
#: A text that only lists the options.
_LIST = re.compile(
    r"(?:[\s*_(\[]*+[A-Ja-j][ \t*_]*+[).:\]](?![^\n\w]*[A-Ja-j][).:\]])[^\n\w]*+\w"
    r"(?:(?!\s[*_(\[]*[A-Ja-j][*_]*[).:\]])[^\n])*+){3,}+\s*+"
)


def chosen_option(response: str) -> str | None:
    """The letter of the option that a response chooses; None when it names none."""
    text = asserted_part(own_part(response, evidence=_CAPITAL))
    for pattern in _IN_WORDS if _LIST.fullmatch(text) else (*_IN_WORDS, *_BY_PLACE):
        for match in reversed(list(pattern.finditer(text))):
            group = match.lastindex or 0
            before, after = sentence_around(text, match.start(group), match.end(group))
            if is_asserted(before, after) and is_asserted("", _VALUE.sub("", after)):
                return match[group].upper()
    return None


@GRADERS.register(
    label="the letter of an option",
    formula="1 if the response chooses the ground truth's option, else 0",
    needs={"a ground truth such as `B` or `B. 26`"},
    answer_of=chosen_option,
    known_responses=lambda ground_truth: (ground_truth, None),
    data_sources=r"multiple_choice|mmlu|gpqa|arc|hellaswag|commonsense_?qa|openbook_?qa|aqua|aqua_rat|sciq|medmcqa",
    in_process=True,
)
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
_PRODUCT = re.compile(r"(?<=[\d)])\s*(?:x\s*(?=[\d(])|(?=\())")
_OPERATION = re.compile(r"[\d)]\s*[-+*/]")
_ARITHMETIC = re.compile(r"[\d+\-*/(). ]*\d[\d+\-*/(). ]*")


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
    data_sources=r"countdown\w*",
    in_process=True,
)
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
    """The arithmetic expression in a place; None if there is none.

    If the text has equals signs, the expression is the first side with an operator, otherwise the first side
    with a number.
    """
    shown = _PRODUCT.sub("*", plain(place.text).translate(SIGNS)[:MAX_EQUATION_CHARS])
    sides = [
        text.lstrip(" .").rstrip(" .(+-*/") for side in shown.split("=") for text in _ARITHMETIC.findall(side)
    ]
    return next((side for side in sides if _OPERATION.search(side)), sides[0] if sides else None)
