r"""Grades mathematical answers: parses an answer as the kind of its ground truth and compares both.

A ground truth is one of three kinds. A *number* ("$1,234", "12 apples", "50\%", also 3\pi) equals numbers,
also in prose. A *text* ("\text{June 20}", "no solution") equals the same text. Any other *expression*, such
as a matrix, an interval or an equation, is compared as a whole by math-verify. A value that cannot be parsed,
or is too large to compute (`rlctl.reward.limits`), equals only the same text.

`rlctl.reward.answer` finds the answer in a response, `rlctl.reward.numbers` parses numbers in prose, and
`rlctl.reward.expressions` parses and compares expressions. Nothing here has a time limit, and `limits` does
not detect every expression on which sympy never finishes, so untrusted responses go through
`rlctl.reward.pool`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import starmap
from typing import TYPE_CHECKING, Any

from rlctl.lazy import LazyModule, lazy_pattern
from rlctl.registry import GRADERS
from rlctl.reward.answer import MATHS, MAX_WORDS, Place, own_part, places
from rlctl.reward.assertion import asserted_part, is_asserted
from rlctl.reward.numbers import (
    FOREIGN,
    Number,
    calculate,
    in_figures,
    is_in_several_units,
    legible,
    measure,
    number_and_rest,
    number_in,
    plain,
)
from rlctl.reward.options import chosen_option
from rlctl.reward.polarity import POLAR, polarity
from rlctl.reward.protocol import any_accepted, same_and_changed
from rlctl.reward.spelling import COMMAND, TIME, WORD, WRAPPER, is_words, spelling, unwrapped
from rlctl.reward.statements import is_statement
from rlctl.reward.time_of_day import TIME_OF_DAY, is_time_of_day, time_of_day
from rlctl.reward.units import NO_UNITS, Units, factor, units_of, units_text

if TYPE_CHECKING:
    from rlctl.reward import expressions
else:
    expressions = LazyModule("rlctl.reward.expressions")

ANSWER_MARK = "####"
#: The letter of an option before its value: `\textbf{(B)}\ 5`, `B. 5`.
_OPTION = lazy_pattern(
    r"^\s*(?:\\(?:text|math)\w*\s*\{\s*)?(?:\([A-J]\)|[A-J](?:[.)]|:(?=\s)))[~.:\s]*\}?"
    r"(?:\\[ ,;:!]|\\q?quad|[~:.\s])*(?=[\d$-]|[A-Za-z](?![A-Za-z])|\\(?!text|math|mbox)[A-Za-z])"
)
#: A line or a named value: "x = 5".
_LINE = lazy_pattern(r"\s*\$?\s*([A-Za-z])\s*=\s*-?[\d./]+[\s.$]*$")
#: Numbers and products with a second meaning; see `_other_readings`.
_WITH_COMMA = lazy_pattern(r"-?(?:\d+|\d{1,3}(?: \d{3})+)(?:,(?!0$)|\{,\})(?!\d{3}$)\d+")
_GROUPS = lazy_pattern(r"-?\d{1,3}(?:,-?(?!0)\d{3})+")
_INDIAN = lazy_pattern(r"-?(?:₹|Rs\.?)?\s?([1-9]\d?(?:,\d\d)+,\d{3})(?:\s*(?:rupees|INR))?")
#: Values in brackets, without brackets in them.
_IN_BRACKETS = lazy_pattern(r"\s*(?:\\left\s*)?\(([^()\[\]]+?)(?:\\right\s*)?\)\s*")
_FACTORS = lazy_pattern(r"\d+(?!(?:st|nd|rd|th)$)[a-z]{1,3}|[a-z]{2}|[abc]{3}|[b-df-hj-np-tv-z]{3}")
#: Values that a sentence lists: "The answers are 12 and 345."
_ENUMERATION = lazy_pattern(
    r"(?:\b(?:are|is)|[:=])[\s$]*(-?\d[\d./]*(?:,\s*-?\d[\d./]*)*,?\s+and\s+-?\d+(?:[./]\d+)*)[\s$.]*$"
)
_LETTER_GOLD = lazy_pattern("[A-J]")
_FRACTION = lazy_pattern(r"\\[dtc]?frac(?![A-Za-z])")
_HALF_DAY = lazy_pattern(r"\s*[ap]\.?m\.?$", re.IGNORECASE)
_EQUALS = lazy_pattern(rf"(?<![<>!\\])=>?|->|(?<=[^\W\d_]):\s|(?<={FOREIGN}):\s|(?<=[^\W\d_] ):\s")
_SEVERAL = lazy_pattern(r",(?!\d{3}(?!\d))|;|\b(?:and|or)\b")
_OTHERS = lazy_pattern(r";|,\s*[-$]?\d|\b(?:and|or)\b")
_BOLD = lazy_pattern(r"\*\*(?=[^*]*\d)([^*\n]+[^*\n:])\*\*")
_PRICE = lazy_pattern(r"\$\s?\d[\d.,]*(?!.*\$)")
_FUNCTION = lazy_pattern(r"\\sqrt|\^|!")
_APPROXIMATELY = lazy_pattern(r"\\(?:approx|simeq)(?![a-z])|≈")
_VERB = lazy_pattern(" (?:is|are|has|have|(?:will|would|must|should) be) ")
_EXCLAMATION = lazy_pattern(r"(?<=\w)!+\s*$")
_ASIDE = lazy_pattern(r"(?<=\S)\s+\([^()]*\)[.\s]*$")
#: Text before a formula that is only a reason or circumstance of what precedes: "is 7, attained at $x = 5$".
_ADJUNCT = lazy_pattern(
    r"[\s,(]+(?:(?:since|because|such that|not|rather than|instead of|rejecting)\s+(?=\$|\\[(\[])"
    r"|(?:(?:which|that|it)\s+)?(?:(?:is\s+)?(?:attained|achieved|reached|obtained)|occurs|when|where|if|for|at|with|in|on)"
    r"(?:\s+(?:all|any|every|at|when|for|by))?\s+(?=(?:\$|\\[(\[])\s*[A-Za-z\\(|]|[a-z]\s*=|\[-?\d)"
    r"(?!.*\b(?:is|are|equals?|becomes|gives|so|thus)\b))",
    re.DOTALL,
)
#: Text after a formula that states its value.
_STATED = lazy_pattern(
    r"\b(?:is|are|was|be|equals?|becomes|gives|measures?)\b"
    r"(?:\s|[^\w.]|(?:equal to|exactly|about|only|also|thus|therefore|then)\b)*\d"
)
#: A formula that is no number: a name, such as ABC, or an inequality.
_NO_NUMBER = lazy_pattern(
    r"(?!.*(?:\d|\\(?:pi|infty)(?![a-z])))|.*(?:[<>]|\\(?:[lg](?:eq?|t)|in)(?![a-z]))", re.DOTALL
)
#: A unit in plain letters after an expression: 2 sqrt(3) units.
_UNIT_WORD = lazy_pattern(r"(?<=[\w})])(?:\s+(?!(?:and|or)\b)(?:[A-Za-z]{3,}|[cdkm]m|ft|in)\.?)+\s*$")
#: A number and words after it, without a formula: "27 at most".
_WITH_WORDS = lazy_pattern(r"\W*\d[\d.,/]*\s+[^\d\\()]*\Z")
#: A part of a sentence that is a formula without marks: "The area is 25\pi", "The solution is (3, 5)".
_BARE = lazy_pattern(
    r"(?<![A-Za-z\\])(?:(?:\d++(?:\.\d++)?+|\\(?:pi|infty|cup|cap|in|le|ge|leq|geq|pm)(?![a-z])|\\sqrt\s*+\{[^{}]*+\}"
    r"|\\[dt]?frac\s*+\{[^{}]*+\}\s*+\{[^{}]*+\}|\\[{}]|[A-Za-z](?![A-Za-z'’])|[-+*/^_()\[\]{}=<>≤≥,;:|])\s*+)++"
)
#: Text between formulas that form one answer: "$x = 1$ or $x = 2$".
_JOINT = lazy_pattern(r"\s*(?:,?\s*(?:and|or)|,)\s*")
#: Brackets, indices and × of an equation's left side. If a letter and a digit remain without them, the left
#: side does not name the right side.
_BRACKETED = lazy_pattern(r"\([^()]*\)|\[[^\[\]]*\]|_\{[^{}]*\}|_\w|(?<=\d)\s*x(?=\s*\d)")
_LETTER = lazy_pattern(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
#: A number in a base, which may be missing; its digits include one from 0 to 9.
_BASED = lazy_pattern(r"\(?((?=[A-F]*\d)[0-9A-F]+)\)?(?:_\{?(\d+)\}?)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Gold:
    """A parsed ground truth: a plain number, else an expression, else (with neither) a text."""

    text: str
    spelling: str  # see `rlctl.reward.spelling`
    number: Number | None
    expression: Any | None
    units: Units
    #: what the text may mean besides: 12,5 is a pair or 12.5, -125,343 a number or a pair, 5am a time or
    #: a product
    others: tuple[Number | Any, ...] = ()

    @property
    def is_text(self) -> bool:
        return self.number is None and self.expression is None and not self.others

    @property
    def is_number(self) -> bool:
        if ":" in self.spelling:  # a ratio
            return False
        return self.number is not None or expressions.is_closed_number(self.expression)


def answer_of(response: str) -> str | None:
    """Returns a response's answer as text that can be a ground truth; None if there is none.

    Equal numbers give equal text ("1/2" and "0.5" alike, percent without its sign), lines do not: "x = 5" and
    "y = 5" differ. Units of measurement belong to it ("90 minutes"), other words do not ("90 apples"). Other
    answers are printed by sympy, or, if they cannot be parsed, returned in their normalised spelling.
    `rlctl.reward.votes` joins answers that are equal though their texts differ.
    """
    unread = None
    for stated in places(response):
        answer = _reading(stated, is_number=True)
        if isinstance(answer, Number):
            name = _LINE.match(plain(stated.text))
            return f"{name[1]} = {answer.value}" if name else f"{answer.value}{units_text(answer.units)}"
        if answer is not None:
            listed = expressions.in_order(unwrapped(stated.text)) if stated.is_whole else None
            if listed:  # without brackets, which would make it a set or a point
                return ", ".join(map(expressions.as_text, listed))
            units = units_text(_units(stated.text)) if stated.is_whole else ""
            return expressions.as_text(answer) + (units and rf"\text{{{units}}}")
        is_bare = stated.text.strip() == response.strip() and not MATHS.fullmatch(response.strip())
        if stated.is_whole and not is_bare:  # announced, or written as a formula
            unread = unread or spelling(stated.text)
        if stated.is_marked:
            break
    return unread or polarity(response)


@GRADERS.register(
    "maths",
    label="the same mathematical answer",
    formula="1 if the answer, read as the same kind of value, equals the ground truth, else 0",
    source="math-verify, with stricter rules",
    needs={"a ground truth that is a number, an expression or a few words"},
    answer_of=answer_of,
    compares_answers=True,
    known_responses=lambda ground_truth: same_and_changed(boxed(ground_truth)),
    score_range=(0.0, 1.0),
    data_sources=(
        r"gsm8k|gsm|math\w*|aime\d*|amc\d*|numina\w*|olympiad\w*|minerva|deepscaler|orz|svamp|asdiv"
        r"|multiarith|polaris|omni_math"
    ),
)
@any_accepted
def grade(response: str, ground_truth: str) -> float:
    """1.0 when the response's answer equals the ground truth, else 0.0 (also when it gives no answer).

    Raises:
        ValueError: the ground truth is not an answer: it is a sentence, or has neither letters nor digits.
    """
    gold = _gold(ground_truth)
    if _LETTER_GOLD.fullmatch(gold.spelling):
        return float(_option(response) == gold.spelling)
    if gold.spelling in POLAR:
        return float(polarity(response) == gold.spelling)
    for stated in places(response):
        if stated.rest and _states_another(stated.rest, gold):
            break
        if not stated.is_whole and TIME.search(gold.spelling):
            return float(is_time_of_day(gold.text, time_of_day(asserted_part(own_part(response)))))
        if stated.is_whole:
            text = unwrapped(_OPTION.sub("", stated.text))
        else:
            text = _formula(stated.text, is_number=gold.is_number) or stated.text
        is_alike = _is_spelled_alike(gold, stated.text, text)
        answers = [] if gold.is_text or is_alike else list(_readings(stated, text, is_number=gold.is_number))
        if is_alike or answers:
            return float(is_alike or _equal(gold, answers, text))
        if stated.is_marked or (gold.is_text and stated.is_announced):
            break
    else:
        return float(gold.is_text and spelling(_last_statement(response)) == gold.spelling)
    return 0.0


def _is_spelled_alike(gold: _Gold, place: str, text: str) -> bool:
    """Whether the text of a place, or the answer in it, equals the ground truth apart from formatting."""
    spellings = [spelling(place), spelling(text)]
    if TIME.search(gold.spelling):
        if not _HALF_DAY.search(gold.spelling):
            spellings = [_HALF_DAY.sub("", form) for form in spellings]
        if is_time_of_day(gold.text, TIME_OF_DAY.fullmatch(text.strip())):
            return True
    return gold.spelling in spellings or _lists_in_brackets(text, gold)


def _lists_in_brackets(text: str, gold: _Gold) -> bool:
    """Whether a text is the list of the ground truth, which has no brackets, in brackets and in its order.

    It may be a point or a list then, but not an interval, which would be no list of values.
    """
    inner = _IN_BRACKETS.fullmatch(text) if "," in gold.text else None
    if inner is None:
        return False
    if inner[1].strip() == gold.text:
        return True
    if gold.is_number and not gold.text.startswith("-"):  # 1,234 is a number, although it may be a list
        return False
    wanted, found = (expressions.in_order(one) or [] for one in (gold.text, inner[1]))
    return len(wanted) == len(found) > 0 and all(map(expressions.equal, wanted, found))


def _option(response: str) -> str | None:
    """The option that a response chooses, in its first mark if there is one."""
    place = next(places(response), None)
    return chosen_option(boxed(plain(place.text)) if place and place.is_marked else response)


def _states_another(rest: str, gold: _Gold) -> bool:
    """Whether the text after a marked answer announces another one than the ground truth."""
    place = next((place for place in places(rest) if place.is_announced), None)
    answer = None if place is None or not gold.is_number else _reading(place, is_number=True)
    return place is not None and answer is not None and not _equal(gold, [answer], place.text)


def _last_statement(response: str) -> str:
    """What the last sentence states, in words: "Tuesday" of "So it is a Tuesday"; else an empty text."""
    sentence = asserted_part(own_part(response)).rstrip().rpartition("\n")[2]
    verbs = list(_VERB.finditer(re.split(r"[.!?]\s+", sentence)[-1]))
    if not verbs:
        return ""
    subject = verbs[-1].string[: verbs[-1].end()]
    stated = verbs[-1].string[verbs[-1].end() :]
    is_sure = is_asserted(subject, "") and not re.search(r"\b(?:or|and|no|not|never)\b", subject)
    return re.sub(r"^(?:an?|the|therefore|thus|on)\s", "", stated.strip()) if is_sure else ""


def boxed(ground_truth: str) -> str:
    r"""The ground truth in `\boxed{}`, the form that prompts request."""
    return f"\\boxed{{{_final(ground_truth)}}}"


def _final(ground_truth: str) -> str:
    return ground_truth.rpartition(ANSWER_MARK)[2].strip()


@lru_cache(maxsize=4096)  # the responses to a prompt share one ground truth
def _gold(ground_truth: str) -> _Gold:
    text = legible(_final(ground_truth)).strip()
    text = text if _PRICE.match(text) else text.strip("$").strip()
    is_prose = "\\" not in text and len(re.findall(r"[A-Za-z]{2,}", text)) > MAX_WORDS
    number = None if TIME.search(text) else _number(text)
    if not re.search(r"\w|\\", text) or (is_prose and number is None):
        raise ValueError(f"the ground truth {ground_truth[:200]!r} is not a mathematical expression")
    expression = None
    if number is None and not is_words(text):
        expression = _expression(text)
    return _Gold(
        text=text,
        spelling=spelling(text),
        number=number,
        expression=expression,
        units=_units(text),
        others=tuple(_other_readings(text)),
    )


def _units(text: str) -> Units:
    """The units at the end of a text, after its expression."""
    bare = expressions.without_units(text)
    return units_of(plain(text.removeprefix(bare))) if bare != text else NO_UNITS


def _other_readings(text: str) -> Iterator[Number | Any]:
    """What a text may mean besides its first meaning; texts in which a comma or a letter has two meanings."""
    if _WITH_COMMA.fullmatch(text):
        yield Number(Fraction(re.sub(r",|\{,\}", ".", text.replace(" ", ""))))
    if _GROUPS.fullmatch(text) and (values := expressions.read(text.replace(",", ", "))) is not None:
        yield values
    if indian := _INDIAN.fullmatch(text):
        yield Number(Fraction(indian[1].replace(",", "")) * (-1 if text.startswith("-") else 1))
    if _FACTORS.fullmatch(text) and (product := expressions.read(text)) is not None:
        yield product


def _readings(place: Place, text: str, *, is_number: bool) -> Iterator[Number | Any]:
    """What a place may mean; `text`: the answer in it."""
    first = _reading(place, is_number=is_number)
    if first is not None:
        yield first
    yield from _other_readings(text)
    if first is None and (values := _ENUMERATION.search(text)):
        listed = expressions.read(values[1])
        if listed is not None and is_asserted(text[: values.start(1)], text[values.end(1) :]):
            yield listed


def _equal(gold: _Gold, answers: list[Number | Any], text: str) -> bool:
    ratio = factor(_units(text), gold.units) if gold.number is None else Fraction(1)
    if ratio is None:
        return False
    if ratio != 1:
        answers = [expressions.scaled(answer, ratio) for answer in answers]
    golds = [gold.expression if gold.number is None else gold.number, *gold.others]
    pairs = [(expected, answer) for expected in golds for answer in answers]
    return _equals_first_reading(gold, answers[0], text) or any(starmap(_same, pairs[1:]))


def _same(gold: Number | Any, answer: Number | Any) -> bool:
    if isinstance(gold, Number) and isinstance(answer, Number):
        return gold.equals(answer)
    gold, answer = (
        expressions.from_number(one) if isinstance(one, Number) else one for one in (gold, answer)
    )
    return expressions.equal(gold, answer)


def _equals_first_reading(gold: _Gold, answer: Number | Any, text: str) -> bool:
    if isinstance(answer, Number):
        if gold.number is not None:
            return gold.number.equals(answer)
        answer = expressions.from_number(answer)
    based, other = (_BASED.fullmatch(form) for form in (gold.spelling, spelling(text)))
    if based and other and based[2]:  # the parser drops the bases
        return based[1].upper() == other[1].upper() and other[2] in {None, based[2]}
    expected = gold.expression if gold.number is None else expressions.from_number(gold.number)
    if expressions.equal(expected, answer):
        return True
    with_units = expressions.read(text)  # the ground truth may have its unit in letters: 5m and 5\text{ m}
    if with_units is not None and with_units != answer and expressions.equal(expected, with_units):
        return True
    others = [expressions.in_other_notation(one) for one in (gold.text, text)]
    parsed = [expressions.read(expressions.without_units(one)) for one in others]
    return others != [gold.text, text] and None not in parsed and expressions.equal(*parsed)


def _reading(place: Place, *, is_number: bool) -> Number | Any | None:
    """Parses a place: as a number first if `is_number`, then as an expression; None if neither succeeds."""
    if place.is_whole:
        return _whole(place.text, is_number=is_number)
    return _prose(place.text, is_number=is_number)


def _whole(text: str, *, is_number: bool) -> Number | Any | None:
    """Parses a text that is only the answer."""
    text = _exact(unwrapped(_OPTION.sub("", text)))
    unit = _UNIT_WORD.search(text)
    shown = plain(text)
    num_words = len(WORD.findall(shown))
    has_unit = num_words > 0 and _WITH_WORDS.match(shown) is not None and not _OTHERS.search(shown)
    is_doubtful = is_number and has_unit and not is_statement("", *number_and_rest(shown))
    if is_doubtful or expressions.is_unfinished(text):
        return None
    if is_number and (number := _amount(text)):
        return number
    is_sentence = num_words > 1 or (num_words == 1 and not re.search(r"\d", shown))
    if not is_number and num_words and MATHS.search(text) and not MATHS.fullmatch(text):
        return _prose(text, is_number=False)
    if is_number and is_sentence and "\\" not in shown and not _SEVERAL.search(in_figures(shown)):
        if MATHS.search(text):
            return _prose(text, is_number=True)
        number = number_in(plain(_statement(text, is_number=True)), words=True)
        if number:
            return number
    elif is_number and unit and is_asserted("", unit[0]):
        text = text[: unit.start()]
    return None if is_words(text) else _expression(text)


def _exact(text: str) -> str:
    r"""The exact value of `\frac{10}{3} \approx 3.33`; nothing if the decimal is no approximation of it."""
    exact, *approximate = _APPROXIMATELY.split(text)
    if not exact.strip() or len(approximate) != 1:
        return text
    value = expressions.value_of(_expression(exact))
    number = _number(approximate[0].strip())
    if value is None or number is None:
        return text
    return exact if number.rounds(value) else ""


def _prose(sentence: str, *, is_number: bool) -> Number | Any | None:
    """Parses the number or formula that a sentence states."""
    sentence = _EXCLAMATION.sub("", _statement(sentence, is_number=is_number))
    if is_number:
        number = _amount(sentence.strip().rstrip("."))
        if number:
            return number
        bold = list(_BOLD.finditer(sentence))
        if bold and (number := number_in(plain(bold[-1][1]))):
            return number if _is_stated(sentence, bold[-1]) else None
    formula = _formula(sentence, is_number=is_number)
    before, found, after = sentence.rpartition(formula or "\0")
    if is_number and found and _STATED.search(after):  # "The value of $x$ is 5."
        formula = None
        sentence = after
    elif is_number and re.search(r"\d", before) and _NO_NUMBER.match(found):  # "There are 5 such $n$."
        formula = None
        sentence = before
    if formula and not (is_number and _amount(formula)):
        is_last = not found or not re.search(r"\d", after)
        if not is_number or is_last or re.search(r"[A-Za-z\[\](\\^{]", plain(formula)):
            return _whole(formula, is_number=is_number)
    if not is_number or "\\begin" in sentence:
        return None
    return number_in(plain(sentence), words=True)


def _is_stated(sentence: str, value: re.Match[str]) -> bool:
    before = sentence[: value.start()]
    after = sentence[value.end() :]
    return is_asserted(before, after) and is_statement(before, value[1], after)


def _statement(sentence: str, *, is_number: bool) -> str:
    """A sentence up to a formula that only explains it or names a circumstance."""
    parts = (sentence[: adjunct.start()] for adjunct in _ADJUNCT.finditer(sentence))
    states = lazy_pattern(r"\d") if is_number else MATHS
    return next(filter(states.search, parts), sentence)


def _number(text: str) -> Number | None:
    r"""Parses a text that is only a number, perhaps with a unit: "$1,234", `\frac{1}{2}\text{ inch}^2`."""
    wrapped = WRAPPER.fullmatch(text)
    text = wrapped[1] if wrapped else text
    is_in_parts = text.count("\\") > 1 and is_in_several_units(text)
    bare = text if is_in_parts else expressions.without_units(text)
    number = measure(plain(bare), has_unit=not _FRACTION.search(bare))
    if number is None or number.units != NO_UNITS:
        return number
    return replace(number, units=units_of(plain(text.removeprefix(bare))))


def _amount(text: str) -> Number | None:
    """Parses an answer that states only one number: "$18 per day", "x = 5", "20 + 6 = 26 apples"."""
    shown = text.strip()
    shown = shown if _PRICE.match(shown) else shown.strip("$")
    left: list[str] = []
    if not _SEVERAL.search(plain(shown)):
        *left, shown = _EQUALS.split(shown)
    aside = _ASIDE.search(shown)
    number = _number(_ASIDE.sub("", shown).strip())
    before = f"{'='.join(left)}=" if left else ""
    if number is None or not is_asserted(before, aside[0] if aside else ""):
        return None
    introduced = text[: text.rindex(shown)] if left else ""
    if not is_statement(introduced, *number_and_rest(plain(shown))):
        return None
    for side in map(plain, left):
        outside = _BRACKETED.sub("", side)
        if re.search(r"\d", outside) and _LETTER.search(outside):
            return None
        value = calculate(side)
        if value is None and _FUNCTION.search(side):
            value = expressions.value_of(_expression(side))
        if value is not None and not number.rounds(value):
            return None
    return number


def _expression(text: str) -> Any | None:
    bare = expressions.without_units(text)
    answer = expressions.read(bare)
    return expressions.read(text) if answer is None and bare != text else answer


def _formula(sentence: str, *, is_number: bool) -> str | None:
    """The last formula that a sentence states, with formulas joined to it; else None.

    A sentence without words is a formula, and so are its parts that look like one. In the answer to a ground
    truth that `is_number`, these parts have a root or π, and no number follows them.
    """
    formulas: list[tuple[int, int, str]] = [
        (match.start(), match.end(), next(filter(None, match.groups()))) for match in MATHS.finditer(sentence)
    ]
    candidates = [one for one in formulas if not WORD.search(COMMAND.sub("", one[2]))]  # not "$5 and then $"
    if not candidates:
        bare = sentence.strip().rstrip(".")
        if not WORD.search(COMMAND.sub("", _UNIT_WORD.sub("", bare))):
            return bare
        candidates = list(_bare_formulas(sentence, is_number=is_number))
        if not candidates:
            return None
    start, end, formula = candidates.pop()
    after = sentence[end:]
    while candidates and _JOINT.fullmatch(sentence[candidates[-1][1] : start]):
        start, _, earlier = candidates.pop()
        formula = f"{earlier}, {formula}"
    is_stated = is_asserted(sentence[:start], after) and is_statement(sentence[:start], formula, after)
    return formula if is_stated else None


def _bare_formulas(sentence: str, *, is_number: bool) -> Iterator[tuple[int, int, str]]:
    """Starts, ends and texts of the formulas that are not marked as such."""
    for run in _BARE.finditer(sentence):
        formula = run[0].rstrip(" ,;:=\n")
        end = run.start() + len(formula)
        is_part = re.search(r"\d", sentence[end:]) or sentence[end : end + 1].isalpha()
        has_value = re.search(r"\\(?:pi|sqrt)" if is_number else r"\d|\\", formula)
        if has_value and not (is_number and is_part):
            yield run.start(), end, formula
