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
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlctl.lazy import LazyModule
from rlctl.registry import GRADERS
from rlctl.reward.answer import MATHS, MAX_WORDS, Place, own_part, places
from rlctl.reward.assertion import asserted_part, is_asserted
from rlctl.reward.graders import chosen_option
from rlctl.reward.numbers import (
    FOREIGN,
    Number,
    calculate,
    in_figures,
    legible,
    measure,
    number_in,
    plain,
    replaced,
    replacements,
    units_of,
)
from rlctl.reward.protocol import same_and_changed

if TYPE_CHECKING:
    from rlctl.reward import expressions
else:
    expressions = LazyModule("rlctl.reward.expressions")

ANSWER_MARK = "####"
#: The letter of an option before its value: `\textbf{(B)}\ 5`, `B. 5`.
_OPTION = re.compile(
    r"^\s*(?:\\(?:text|math)\w*\s*\{\s*)?(?:\([A-J]\)|[A-J](?:[.)]|:(?=\s)))[~.:\s]*\}?"
    r"(?:\\[ ,;:!]|\\q?quad|[~:.\s])*(?=[\d$-]|[A-Za-z](?![A-Za-z])|\\(?!text|math|mbox)[A-Za-z])"
)
_LETTER_GOLD = re.compile("[A-J]")
_WRAPPER = re.compile(
    r"\\(?:text\w*|mbox|hbox|math(?:rm|bf|it)|boldsymbol|underline|operatorname)\s*\{([^{}]*)\}"
)
_FRACTION = re.compile(r"\\[dtc]?frac(?![A-Za-z])")
_COMMAND = re.compile(r"\\[A-Za-z]+\s*(?:\{[^{}]*\})?")
_WORD = re.compile(
    rf"(?<![^\W\d_])(?<!\\)[^\W\d_]{{3,}}|{FOREIGN}|(?<!\S)(?i:is|it|so|in|no|of|to|we|he|if|my)(?=[\s,]|$)"
    r"|\b(?i:it|that|there|i)['’][a-z]"
)
_TIME = re.compile(r"\d:\d\d")
#: Words of three or more letters that are mathematical notation.
_NAMES = re.compile(
    r"and|sqrt|a?(?:sin|cos|tan)h?|cot|sec|csc|log|exp|lim|min|max|mod|gcd|lcm|det|inf(?:inity)?"
)
_EQUALS = re.compile(rf"(?<![<>!\\])=>?|->|(?<=[^\W\d_]):\s|(?<={FOREIGN}):\s|(?<=[^\W\d_] ):\s")
_SEVERAL = re.compile(r",(?!\d{3}(?!\d))|;|\b(?:and|or)\b")
_BOLD = re.compile(r"\*\*(?=[^*]*\d)([^*\n]+[^*\n:])\*\*")
_FUNCTION = re.compile(r"\\sqrt|\^|!")
_VERB = re.compile(" (?:is|are|has|have) ")
_EXCLAMATION = re.compile(r"(?<=\w)!+\s*$")
_ASIDE = re.compile(r"(?<=\S)\s+\([^()]*\)[.\s]*$")
#: Text before a formula that is only a reason or circumstance of what precedes: "is 7, attained at $x = 5$".
_ADJUNCT = re.compile(
    r"[\s,(]+(?:(?:since|because|such that|not|rather than|instead of|rejecting)\s+(?=\$|\\[(\[])"
    r"|(?:(?:which|that|it)\s+)?(?:(?:is\s+)?(?:attained|achieved|reached|obtained)|occurs|when|where|if|for|at|with|in|on)"
    r"(?:\s+(?:all|any|every|at|when|for|by))?\s+(?=(?:\$|\\[(\[])\s*[A-Za-z\\(|]|[a-z]\s*=|\[-?\d)"
    r"(?!.*\b(?:is|are|equals?|becomes|gives|so|thus)\b))",
    re.DOTALL,
)
#: Text after a formula that states its value.
_STATED = re.compile(
    r"\b(?:is|are|was|be|equals?|becomes|gives|measures?)\b"
    r"(?:\s|[^\w.]|(?:equal to|exactly|about|only|also|thus|therefore|then)\b)*\d"
)
#: A formula that is no number: a name, such as ABC, or an inequality.
_NO_NUMBER = re.compile(
    r"(?!.*(?:\d|\\(?:pi|infty)(?![a-z])))|.*(?:[<>]|\\(?:[lg](?:eq?|t)|in)(?![a-z]))", re.DOTALL
)
#: A unit in plain letters after an expression: 2 sqrt(3) units.
_UNIT_WORD = re.compile(r"(?<=[\w})])(?:\s+(?!(?:and|or)\b)(?:[A-Za-z]{3,}|[cdkm]m|ft|in)\.?)+\s*$")
#: A part of a sentence that is a formula without marks: "The area is 25\pi", "The solution is (3, 5)".
_BARE = re.compile(
    r"(?<![A-Za-z\\])(?:(?:\d++(?:\.\d++)?+|\\(?:pi|infty|cup|cap|in|le|ge|leq|geq|pm)(?![a-z])|\\sqrt\s*+\{[^{}]*+\}"
    r"|\\[dt]?frac\s*+\{[^{}]*+\}\s*+\{[^{}]*+\}|\\[{}]|[A-Za-z](?![A-Za-z'’])|[-+*/^_()\[\]{}=<>≤≥,;:|])\s*+)++"
)
#: Text between formulas that form one answer: "$x = 1$ or $x = 2$".
_JOINT = re.compile(r"\s*(?:,?\s*(?:and|or)|,)\s*")
#: Brackets, indices and × of an equation's left side. If a letter and a digit remain without them, the left
#: side does not name the right side.
_BRACKETED = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|_\{[^{}]*\}|_\w|(?<=\d)\s*x(?=\s*\d)")
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
#: Texts and symbols of one meaning, with the symbol that stands for all.
_SYNONYMS = replacements("synonyms", re.IGNORECASE, r"^\s*(?:{})\s*$")
#: A number in a base, which may be missing; its digits include one from 0 to 9.
_BASED = re.compile(r"\(?((?=[A-F]*\d)[0-9A-F]+)\)?(?:_\{?(\d+)\}?)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Gold:
    """A parsed ground truth: a plain number, else an expression, else (with neither) a text."""

    text: str
    spelling: str  # see `_spelling`
    number: Number | None
    expression: Any | None

    @property
    def is_text(self) -> bool:
        return self.number is None and self.expression is None

    @property
    def is_number(self) -> bool:
        if ":" in self.spelling:  # a ratio
            return False
        return self.number is not None or expressions.is_closed_number(self.expression)


def answer_of(response: str) -> str | None:
    """Returns a response's answer as text; None if there is none.

    Equal numbers give equal text ("1/2" and "0.5" alike, percent without its sign). Other answers are printed
    by sympy, or, if they cannot be parsed, returned in their normalised spelling.
    """
    unread = None
    for place in places(response):
        answer = _reading(place, is_number=True)
        if isinstance(answer, Number):
            return str(answer.value)
        if answer is not None:
            return expressions.as_text(answer)
        is_bare = place.text.strip() == response.strip() and not MATHS.fullmatch(response.strip())
        if place.is_whole and not is_bare:  # announced, or written as a formula
            unread = unread or _spelling(place.text)
        if place.is_marked:
            break
    return unread or None


@GRADERS.register(
    "maths",
    label="the same mathematical answer",
    formula="1 if the answer, read as the same kind of value, equals the ground truth, else 0",
    source="math-verify, with stricter rules",
    needs={"a ground truth that is a number, an expression or a few words"},
    answer_of=answer_of,
    known_responses=lambda ground_truth: same_and_changed(boxed(ground_truth)),
    data_sources=(
        r"gsm8k|gsm|math\w*|aime\d*|amc\d*|numina\w*|olympiad\w*|minerva|deepscaler|orz|svamp|asdiv"
        r"|multiarith|polaris|omni_math"
    ),
)
def grade(response: str, ground_truth: str) -> float:
    """1.0 when the response's answer equals the ground truth, else 0.0 (also when it gives no answer).

    Raises:
        ValueError: the ground truth is not an answer: it is a sentence, or has neither letters nor digits.
    """
    gold = _gold(ground_truth)
    if _LETTER_GOLD.fullmatch(gold.spelling):
        place = next(places(response), None)
        marked = boxed(plain(place.text)) if place and place.is_marked else response
        return float(chosen_option(marked) == gold.spelling)
    for place in places(response):
        if place.is_whole:
            text = _unwrapped(_OPTION.sub("", place.text))
        else:
            text = _formula(place.text, is_number=gold.is_number) or place.text
        if gold.spelling in (_spelling(place.text), _spelling(text)):
            return 1.0
        answer = None if gold.is_text else _reading(place, is_number=gold.is_number)
        if answer is not None:
            return float(_equal(gold, answer, text))
        if place.is_marked or (gold.is_text and place.is_announced):
            return 0.0
    return float(gold.is_text and _spelling(_last_statement(response)) == gold.spelling)


def _last_statement(response: str) -> str:
    """What the last sentence states, in words: "Tuesday" of "So it is a Tuesday"; else an empty text."""
    sentence = asserted_part(own_part(response)).rstrip().rpartition("\n")[2]
    verbs = list(_VERB.finditer(re.split(r"[.!?]\s+", sentence)[-1]))
    if not verbs:
        return ""
    subject, stated = verbs[-1].string[: verbs[-1].end()], verbs[-1].string[verbs[-1].end() :]
    is_sure = is_asserted(subject, "") and not re.search(r"\b(?:or|and|no|not|never)\b", subject)
    return re.sub(r"^(?:an?|the|therefore|thus|on)\s", "", stated.strip()) if is_sure else ""


def boxed(ground_truth: str) -> str:
    r"""The ground truth in `\boxed{}`, the form that prompts request."""
    return f"\\boxed{{{_final(ground_truth)}}}"


def _final(ground_truth: str) -> str:
    return ground_truth.rpartition(ANSWER_MARK)[2].strip()


@lru_cache(maxsize=4096)  # the responses to a prompt share one ground truth
def _gold(ground_truth: str) -> _Gold:
    text = legible(_final(ground_truth)).strip().strip("$").strip()
    is_prose = "\\" not in text and len(re.findall(r"[A-Za-z]{2,}", text)) > MAX_WORDS
    number = None if _TIME.search(text) else _number(text)
    if not re.search(r"\w|\\", text) or (is_prose and number is None):
        raise ValueError(f"the ground truth {ground_truth[:200]!r} is not a mathematical expression")
    expression = None
    if number is None and not _is_words(text):
        expression = _expression(text)
    return _Gold(text, _spelling(text), number, expression)


def _is_words(text: str) -> bool:
    r"""Whether a text is or contains words: "no solution", `\text{(A)}`, "5 and a half"."""
    bare = _WRAPPER.sub("", text)
    words = _WORD.findall(_COMMAND.sub(" ", bare))
    return not re.search(r"[\w\\]", bare) or any(not _NAMES.fullmatch(word) for word in words)


def _equal(gold: _Gold, answer: Number | Any, text: str) -> bool:
    if isinstance(answer, Number):
        if gold.number is not None:
            return gold.number.equals(answer)
        answer = expressions.from_number(answer)
    based, other = (_BASED.fullmatch(spelling) for spelling in (gold.spelling, _spelling(text)))
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
    text = _unwrapped(_OPTION.sub("", text))
    if is_number and (number := _amount(text)):
        return number
    shown = plain(text)
    num_words = len(_WORD.findall(shown))
    is_sentence = num_words > 1 or (num_words == 1 and not re.search(r"\d", shown))
    if is_number and is_sentence and "\\" not in shown and not _SEVERAL.search(in_figures(shown)):
        if MATHS.search(text):
            return _prose(text, is_number=True)
        if number := number_in(plain(_statement(text, is_number=True)), words=True):
            return number
    elif is_number and (unit := _UNIT_WORD.search(text)) and is_asserted("", unit[0]):
        text = text[: unit.start()]
    return None if _is_words(text) else _expression(text)


def _prose(sentence: str, *, is_number: bool) -> Number | Any | None:
    """Parses the number or formula that a sentence states."""
    sentence = _EXCLAMATION.sub("", _statement(sentence, is_number=is_number))
    if is_number:
        if number := _amount(sentence.strip().rstrip(".")):
            return number
        bold = list(_BOLD.finditer(sentence))
        if bold and (number := number_in(plain(bold[-1][1]))):
            return number if _is_stated(sentence, bold[-1]) else None
    formula = _formula(sentence, is_number=is_number)
    before, found, after = sentence.rpartition(formula or "\0")
    if is_number and found and _STATED.search(after):  # "The value of $x$ is 5."
        formula, sentence = None, after
    elif is_number and re.search(r"\d", before) and _NO_NUMBER.match(found):  # "There are 5 such $n$."
        formula, sentence = None, before
    if formula and not (is_number and _amount(formula)):
        is_last = not found or not re.search(r"\d", after)
        if not is_number or is_last or re.search(r"[A-Za-z\[\](\\^{]", plain(formula)):
            return _whole(formula, is_number=is_number)
    if not is_number or "\\begin" in sentence:
        return None
    return number_in(plain(sentence), words=True)


def _is_stated(sentence: str, value: re.Match[str]) -> bool:
    return is_asserted(sentence[: value.start()], sentence[value.end() :])


def _statement(sentence: str, *, is_number: bool) -> str:
    """A sentence up to a formula that only explains it or names a circumstance."""
    parts = (sentence[: adjunct.start()] for adjunct in _ADJUNCT.finditer(sentence))
    states = re.compile(r"\d") if is_number else MATHS
    return next(filter(states.search, parts), sentence)


def _number(text: str) -> Number | None:
    r"""Parses a text that is only a number, perhaps with a unit: "$1,234", `\frac{1}{2}\text{ inch}^2`."""
    wrapped = _WRAPPER.fullmatch(text)
    bare = expressions.without_units(wrapped[1] if wrapped else text)
    number = measure(plain(bare), has_unit=not _FRACTION.search(bare))
    return number and replace(number, units=number.units or units_of(plain(text.removeprefix(bare))))


def _amount(text: str) -> Number | None:
    """Parses an answer that states only one number: "$18 per day", "x = 5", "20 + 6 = 26 apples"."""
    shown = text.strip().strip("$")
    left: list[str] = []
    if not _SEVERAL.search(plain(shown)):
        *left, shown = _EQUALS.split(shown)
    aside = _ASIDE.search(shown)
    number = _number(_ASIDE.sub("", shown).strip())
    before = f"{'='.join(left)}=" if left else ""
    if number is None or not is_asserted(before, aside[0] if aside else ""):
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
    found = [one for one in formulas if not _WORD.search(_COMMAND.sub("", one[2]))]  # not "$5 and then $"
    if not found:
        bare = sentence.strip().rstrip(".")
        if not _WORD.search(_COMMAND.sub("", _UNIT_WORD.sub("", bare))):
            return bare
        found = list(_bare_formulas(sentence, is_number=is_number))
        if not found:
            return None
    start, end, formula = found.pop()
    after = sentence[end:]
    while found and _JOINT.fullmatch(sentence[found[-1][1] : start]):
        start, _, earlier = found.pop()
        formula = f"{earlier}, {formula}"
    return formula if is_asserted(sentence[:start], after) else None


def _bare_formulas(sentence: str, *, is_number: bool) -> Iterator[tuple[int, int, str]]:
    """Starts, ends and texts of the formulas that are not marked as such."""
    for run in _BARE.finditer(sentence):
        formula = run[0].rstrip(" ,;:=\n")
        end = run.start() + len(formula)
        is_part = re.search(r"\d", sentence[end:]) or sentence[end : end + 1].isalpha()
        has_value = re.search(r"\\(?:pi|sqrt)" if is_number else r"\d|\\", formula)
        if has_value and not (is_number and is_part):
            yield run.start(), end, formula


def _unwrapped(text: str) -> str:
    """A formula without `$`, brackets or backticks around it; any other text unchanged."""
    formula = MATHS.fullmatch(text.strip().strip("`").rstrip("."))
    return next(filter(None, formula.groups())) if formula else text.strip("`")


def _spelling(text: str) -> str:
    """Normalises a text's formatting; equal spellings are equal answers of any kind."""
    text = _unwrapped(legible(text)).rstrip("$. \n").lstrip("$ \n")
    while (shown := _WRAPPER.sub(r" \1 ", text)) != text:
        text = shown
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-z])|\\[,;:! ]|~|(?<!\w)\*\*|\*\*(?!\w)", " ", text)
    text = re.sub(r"(?<=\\)[dtc](?=frac|binom)", "", text).replace("**", "^")
    text = re.sub(r"\\(?:cdot|times)(?![a-z])", "*", text)
    text = re.sub(r"\\[lcd]?dots|\.\.\.(?=[,+])", r"\\dots", text)
    text = re.sub(r"(\\[a-z]+)\s*\{(\w)\}", r"\1 \2", text)
    text = replaced(text, _SYNONYMS)
    if _is_words(text) or _TIME.search(text):
        text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|(?<=[a-z]{3})s\b|[\"()]", "", text.casefold())
        text = re.sub(r",?\s+and\s+", ", ", text)
    text = re.sub(r"(?<=[A-Za-z])\.|(?<=\d)\s+(?=[A-Za-z])", "", text)
    text = re.sub(r"\s+(?![A-Za-z0-9])|(?<![A-Za-z0-9])\s+", "", re.sub(r"\s+", " ", text))
    return re.sub(r"^\(([A-Za-z])\)$|\{(\w)\}", r"\1\2", text)
