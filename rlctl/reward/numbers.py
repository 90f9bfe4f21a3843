"""Parses numbers in prose, and selects the number that a sentence states."""

from __future__ import annotations

import ast
import itertools
import operator
import re
import tomllib
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from rlctl.lazy import lazy_pattern
from rlctl.reward import number_words
from rlctl.reward.assertion import is_asserted
from rlctl.reward.statements import is_statement
from rlctl.reward.units import NO_UNITS, Units, factor, units_of


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is written."""

    value: Fraction  # of a percentage, the number before the sign
    is_percent: bool = False  # a percent sign follows
    units: Units = NO_UNITS

    @property
    def is_decimal(self) -> bool:
        """Whether it is a decimal fraction such as 0.25, not an integer."""
        below = self.value.denominator
        return below > 1 and pow(10, below.bit_length(), below) == 0

    def equals(self, other: Number) -> bool:
        """Whether the values are equal; "50%" equals "50" and "0.5", but "0.5%" is not "0.5".

        A decimal fraction may differ by up to 5e-7, but not by more than 1e-4 of the value. Units are
        converted if both have one: "5 cm" equals "5" and "50 mm", not "5 m".
        """
        ratio = factor(other.units, self.units)
        if ratio is None:
            return False
        if ratio != 1:
            other = replace(other, value=other.value * ratio)
        if self.is_percent == other.is_percent:
            return self._is_close(other.value, other)
        if abs(self.value) >= 1 and self._is_close(other.value, other):
            return True
        return self._is_close(other.value / 100 if other.is_percent else other.value * 100, other)

    def rounds(self, value: Fraction) -> bool:
        """Whether it is `value`, or a decimal or integer that rounds it."""
        scale = next((10**n for n in range(10) if (self.value * 10**n).denominator == 1), None)
        return value == self.value or (scale is not None and abs(value - self.value) * scale < 1)

    def _is_close(self, value: Fraction, other: Number) -> bool:
        gap = abs(self.value - value)
        is_rounded = self.is_decimal or other.is_decimal
        return gap == 0 or (is_rounded and 2_000_000 * gap <= 1 and 10_000 * gap <= abs(self.value))


_NOTATIONS = tomllib.loads(Path(__file__).with_name("notations.toml").read_text(encoding="utf-8"))
#: Patterns, what replaces their matches, and what a text must contain in lower case for a match.
Replacements = list[tuple[re.Pattern[str], str, str]]


def replacements(key: str, flags: int = 0, form: str = "{}") -> Replacements:
    """The replacements of a key of `notations.toml`; `form` is what stands around each pattern."""
    entries = ((*entry, "")[:3] for entry in _NOTATIONS[key])
    return [(lazy_pattern(form.format(pattern), flags), text, needed) for pattern, text, needed in entries]


def replaced(text: str, by: Replacements) -> str:
    """The text after all replacements, in their order."""
    lower = text.lower()
    for pattern, shown, needed in by:
        if needed not in lower:
            continue
        changed = pattern.sub(shown, text)
        if changed != text:
            text = changed
            lower = changed.lower()
    return text


_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad"))
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u202f\u3000"), " ")
_PUNCTUATION = {0x3002: ". ", 0x3001: ", ", 0xFF0C: ", ", 0x060C: ", ", 0x061F: "? ", 0x0964: ". "}
_SEPARATORS = {0x066B: ".", 0x066C: ","}  # of Arabic
_ARROWS = dict.fromkeys(map(ord, "⇒⟹→⟶"), "=>")
_SIGNS = dict.fromkeys(map(ord, "\u2212\u2010\u2011\ufe63"), "-") | {0x2044: "/"}
_VULGAR = {ord(c): " " + unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
#: Mathematical characters, in LaTeX.
_NAMES = {"π": "pi", "∞": "infty", "∪": "cup", "∩": "cap", "∈": "in", "∅": "emptyset"}
_SYMBOLS = {ord(symbol): f"\\{name} " for symbol, name in _NAMES.items()}
#: A letter or vowel sign of a script that is neither Latin nor Greek.
FOREIGN = r"[\u0400-\u1dff\u2e80-\ud7ff\uf900-\ufdff\ufe70-\ufefe]"
#: Between such a letter and a number, formula or letter.
_SCRIPTS = lazy_pattern(rf"(?<={FOREIGN})(?=[-+.$\\\w])(?!{FOREIGN})|(?<=[\d$}}A-Za-z])(?={FOREIGN})")
_DIGIT = lazy_pattern(r"(?![0-9])\d")
_CHARACTERS = (
    _FULL_WIDTH | _INVISIBLE | _SPACES | _PUNCTUATION | _SEPARATORS | _ARROWS | _SIGNS | _VULGAR | _SYMBOLS
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n")
_EXPONENT = lazy_pattern("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]+")
_COLOR = lazy_pattern(r"\\(?:text)?color\s*\{\w+\}")
#: Arithmetic in words, next to digits, and its symbols.
_IN_WORDS = replacements("in_words", re.IGNORECASE)
#: Fractions in words, beside figures: "3 quarters".
_FRACTIONS = replacements("fractions", re.IGNORECASE)
#: A base in words: "2516 in base 8", `2516_{\\text{eight}}`.
_IN_BASE = r"(\d+|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)\b"
_BASE = lazy_pattern(
    rf"(?<=\d)(?:\s*\\text\w*\s*\{{\s*\(?(?:in )?base[ -]{_IN_BASE}\)?\s*\}}"
    rf"|\s*\\text\s*\{{\s*base\s*\}}\s*{_IN_BASE}|\s*\(?(?:in )?base[ -]{_IN_BASE}\)?"
    rf"|_\s*\{{\s*(?:\(|\\text\s*\{{\s*){_IN_BASE}\s*[)}}]\s*\}})",
    re.IGNORECASE,
)
_ROOT = lazy_pattern(
    r"(?:√|(?<![\\a-z])sqrt(?=\s*[\d({]))\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\)|\{([^{}]*)\})"
)

_PLAIN = replacements("plain")

#: A quantity in several units: 3 hours and 30 minutes, 5 ft 4 in; and one of its parts.
_UNIT_NAME = (
    r"(?:weeks?|days?|hours?|hrs?|h|minutes?|mins?|seconds?|secs?|s|years?|yrs?|months?|feet|foot|ft|inch(?:es)?|in|yards?"
    r"|k?m|cm|meters?|metres?|centimeters?|kg|kilograms?|grams?|g|pounds?|lbs?|ounces?|oz)"
)
_IN_PARTS = lazy_pattern(
    rf"(?<![\w.,/^-])\d{{1,6}}\s{{0,3}}{_UNIT_NAME}\b(?:,?\s{{1,3}}(?:and\s{{1,3}})?\d{{1,6}}(?:\.\d{{1,6}})?\s{{0,3}}{_UNIT_NAME}\b){{1,3}}"
    r"(?!\s*(?:/|\^|per\b))"
)
_PART = lazy_pattern(rf"(\d+(?:\.\d+)?)\s*({_UNIT_NAME})\b")

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
#: Signs of arithmetic as Python writes them.
SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "[": "(", "]": ")", "{": "(", "}": ")"})

#: Numbers such as 1.5e3 and 1e-05, as programs print them; 2e-3 may be 2e − 3.
_SCIENTIFIC = lazy_pattern(
    r"(?<![\w.\\])(?:\d+\.\d+[eE][-+]?\d{1,3}|\d+[eE](?:\d{1,3}|[-+]\d{2,3})|1[eE][-+]\d)(?![\w^\\{(]|\.\d)"
)
#: A repeating decimal: 0.1\overline{6}.
_REPEATING = lazy_pattern(
    r"(?<![\w.])(\d{0,30})\.(?:(\d{0,9})\\(?:overline|bar|dot(?=\s*\{\s*\d\s*\}))\s*\{\s*(\d{1,9})\s*\}"
    r"|(\d{0,9}?)(\d{1,9}?)\5{2,9}(?:…|\.\.\.|\\[lc]?dots(?![a-z])))"
)
#: 1.5 × 10^3, in LaTeX or plain text.
_POWER_OF_TEN = lazy_pattern(
    r"(?<![\w.,])(\d+(?:\.\d+)?)\s*(?:\\times|\\cdot|\\ast|[*×·x])\s*10\s*(?:\^|\*\*)\s*"
    r"(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))(?![\w^]|\.\d)"
)
_DIGITS = (
    r"(?:\d{1,3}(?:\.\d{3})+,\d{1,2}(?!\d)|\d{1,3}(?:\.\d{3}){2,}(?![\d.])"  # 1.234,00 and 1.234.567
    r"|[1-9]\d{0,2}(?:[, ]\d{3})+(?![\d,]|-[a-z])(?:\.\d+)?"  # 1,234.00 and 1 234
    r"|\d+(?:\.\d+)?|\.\d+)"
)
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NUMBER = lazy_pattern(
    r"(?<![\w.])(?<!_\{)(?P<minus>(?:(?<![\w)])-(?=[$€£¥₹\d.]))?)(?:US)?[$€£¥₹]*\s?(?P<inner>-?)"
    rf"(?P<digits>{_DIGITS})(?:(?P<mixed>\s+\d+)?\s?/\s?(?P<under>\d+)(?!\d|\.\d))?"
    rf"(?:\s*(?P<scale>{'|'.join(SCALES)})s?\b)?(?P<percent>\s?(?:%|per ?cent\b))?"
    r"(?P<stuck>(?:st|nd|rd|th|k)\b|:\d|\s?\\(?:pi|sqrt|infty)(?![a-z]))?",
    re.IGNORECASE,
)
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee"}
_FORMULA_END = lazy_pattern(r"[^$\n]{0,80}\$")
_SHORT_UNIT = (
    r"(?:[cdkm]m|ft|in|mi|yd|k?g|mg|lbs?|oz|m[lL]|[lL]|hr?s?|mins?|s|[ap]m|[AP]M|mph|kph"
    r"|k?[NJWV]|[kM]?Pa|[kMG]?Hz|mol|k?cal|kWh)\b"
)
#: Text after a number that is only its unit. Two letters that are not a unit are a product: 5 xy.
_LETTERS = rf"(?:[^\W\d_]|{FOREIGN})*+"  # possessive: the words of a unit are found in one way only
_POWER = r"(?:\s*\^\s*\{?\d\}?)?"
_UNIT = lazy_pattern(
    r"(?!\s*(?:pi|sqrt|or|and|log|ln|sin|cos|tan|mod|x|i|e|off|halves|(?:thir|four|fif|six|seven|eigh|nin|ten)(?:d|th)s)\b)"
    r"(?!.*\b(?:not|never|cannot|than|wrong|incorrect)\b|.*n['’]t\b)"
    rf"(?:(?:\s*[/$¢%€£'\"]|{_SHORT_UNIT}{_POWER}"
    rf"|[\s-]+(?:(?:(?:[^\W\d_]{{3}}|{FOREIGN}){_LETTERS}|sq\b)\.?|{_SHORT_UNIT}|[cCdgGhKLlmsVWN]\b){_POWER})"
    rf"(?:\s*(?:[/$%¢-]\s*)?(?:[^\W\d_]{{2}}|{FOREIGN}){_LETTERS}\.?{_POWER}|\s*/\s*[A-Za-z]\b{_POWER}|\s*[/$¢%€£'\"])*)?"
    r"[\s.$*\u2600-\U0001faff]*"
)
_END = lazy_pattern(r"[\s.$*%]*")
#: Text after a number that is an operand, not a result.
_OPERAND_OF = lazy_pattern(
    r"!(?=\)?\.)"  # a factorial, not the end of a sentence
    r"|\s*(?:[A-Za-z]+(?:/[a-z]+)?\s+|[A-Za-z]+(?=/))?[)\]]*\s*(?:[-+*/×÷·^=]|x(?=[\s\d]))\s*[(\[$€£-]*\s*\.?\d|\(\s*\.?\d"
    r"|\s*[-+*/^]\s*[b-z](?![A-Za-z'’./])"
    r"|\s+(?:more|less|fewer|greater|smaller|larger) than\s+[$€£]?(?:\d|[a-z]\b)"
    r"|\s+(?:[a-z]+\s+)?(?:(?:off|away|short|shy|removed)\s+(?:from|of|by)|(?:above|below))\s+[$€£]?\d"
    r"|\s+(?:out\s+of|(?:steps|units|places)\s+from)\s+[$€£]?\d"
    r"|\s+(?:to\s+[$€£]?\d|(?:halves|thirds|fourths|quarters|fifths)\b)"
)
#: Text before such a number.
_OPERATOR = lazy_pattern(
    r"(?:[\d)%]\s*(?:[A-Za-z]+\s+)?(?:[-+*/×÷·^(]|(?<=[\d\s])x)\s*[($€£-]*"
    r"|(?:\^|\\sqrt)\s*(?:\[\d+\]\s*)?\{?"
    r"|\b(?i:times|plus|half(?: of)?|twice|double|triple|log|ln|(?:root|square|cube|factorial|opposite"
    r"|negative|inverse|reciprocal|(?:third|fourth|quarter|fifth)s?) of)\b"
    r"\s*[($€£]*|\bout of\s+[$€£]?|\b(?:differs?|off)\b[^.;]*\bby\s+[$€£]?"
    r"|\d\s+(?:[a-z]+\s+)?(?:off|away|short|shy|removed)\s+(?:from|of)\s+[$€£]?|\boff\s+(?:from\s+)?[$€£]?)\s*$"
)
#: Text after a percentage that is an operand.
_OF_NUMBER = lazy_pattern(r"\s+of\s+[$€£]?\d")
#: Text before a number: an equation that is not solved for its letter, such as 2x + 3 = 7. In 5 m = 500 cm
#: the letter is a unit.
_UNSOLVED = lazy_pattern(
    r"(?:(?<![A-Za-z])[a-z]\s*[-+*/^]\s*[\d.]+|\d\s*[-+*/^]?\s*[a-fi-kn-rt-z])\s*=\s*[($€£-]*\s*$"
)
_NAMED = lazy_pattern(  # June 20, Chapter 12
    r"(?:Page|Chapter|Section|Figure|Table|Exercise|Problem|Question|Step|Example|Theorem|Lemma|Equation|Appendix)\s+$|"
    r"\b(?:is|was|on|by|until)[\s$]+[A-Z][a-z]+\s+$"
    r"|\b(?:January|February|March|April|May|June|July|August|September|October|November|December)\s+$"
)
#: Text before and after a number in a list: "41 and 42", "3, 4 or 5".
_NUMBER_AND = lazy_pattern(
    r"(?:\d[%)]?|(?:^|\b(?:is|are)\s)[\s$]*\d\S*(?:\s+[a-z]+){1,2})"
    r"\s*,?\s*\(?(?:[,;]|\b(?:and|or)(?: (?:also|else|even|maybe|perhaps|possibly))?\b|&)\s*[($€£-]*$"
)
#: Text before a number in a list of values of one name: "x = 41 and x = 42".
_ALSO = lazy_pattern(
    r"\b([a-z])(?:_\w)?\s*=\s*\S*\d\)?,?\s+(?:and |or )?\s*\1(?:_\w)?\s*=\s*[($€£-]*$", re.IGNORECASE
)
_AND_NUMBER = lazy_pattern(r"[%)]?\s*,?\s*(?:[,;]\s|\b(?:and|or)\b|&)\s*[($€£-]*\d")
_OR = lazy_pattern(r"(?:\s+[a-z]+){1,3},?\s+or\s+")
_RESULT = lazy_pattern(
    r"(?:=|\b(?:which|that|it) (?:is|was|equals|makes)|\brounds?(?: up| down| off)? to|\bmeaning)\s+"
    r"(?:about\s+)?[($€£-]*\s*$"
    r"|=[($€£-]*$"
)
_FEW = (
    r"(?:(?:the|an?|all|his|her|their|its|these|those|just|only|about|another|each|next|first|last|of"
    r"|\$)\s*)*$"
)
_MAY_BE = r"(?<!need )(?<!needs )(?<!able )(?<!has )(?<!have )(?<!had )(?<!going )"
#: Text before a number that is a circumstance ("in 5 days") or part of a purpose ("to make 2 robes").
_ASIDE = lazy_pattern(
    r"\b(?:(?:in|after|for|per|every|over|on|by|at|from|during|within|than|with|between|until|before|of|when)"
    rf"(?:\s+[a-z]+ing)?|or|{_MAY_BE}to\s+[a-z]+|from\b[^,]*\bto|day|week|month|year|step|part|question|grade|page"
    rf"|number|#)\s+{_FEW}|\b(?:the|these|those)\s+$|\bthe (?-i:[A-Z])[a-z]+\s+$",
    re.IGNORECASE,
)
#: Text after such a number: "4 years from now", "5 PM".
_ASIDE_OF = lazy_pattern(r"\s*(?:[ap]\.?m\b|\w+\s+(?:ago|later|from now|earlier)\b)|-[A-Za-z]", re.IGNORECASE)
#: Exceptions: text before the amount that a sentence states.
_AMOUNT = lazy_pattern(
    r"\b(?:total|sum|average|cost|price|profit|loss|amount|earnings|savings|speed|rate|balance|maximum|minimum"
    rf"|equal|comes?|came|amounts?|adds? up|up|left|ends? up)\s+(?:of|at|to|with|by)\s+{_FEW}",
    re.IGNORECASE,
)
#: Text between two numbers of the same role: "for 5 dogs and 3 cats".
_AND = lazy_pattern(r"\d\S*(?:\s+[a-z]+){0,3}\s+and\s+$")
_COPULA = lazy_pattern(r"\b(?:is|are|was|were|be)\s+[($€£-]*$")
#: Start of a part that only explains the rest of the sentence.
_EXPLANATION = lazy_pattern(
    r"\b(?:because|since|as (?:she|he|it|they|there)|given|assuming|if|when|while|whereas|than|compared|after"
    r"|before|once)\b|(?<![A-Za-z])[(]|\bto [a-z]+\b[^,;]*$"
)
#: Before the conclusion from an equation: "2 * 16 = 32, so the next even number is 34".
_CONCLUSION = lazy_pattern(r",\s+(?:and )?(?:so|thus|hence|therefore|which means)\b(?=.*\d)")
#: Maximum number of a sentence's numbers that are ranked: the last ones.
MAX_NUMBERS = 64
#: Maximum characters read before and after a number.
MAX_CHARS_BEFORE = 200
_RESULT_OF, _BEST, _FAIR, _LESS, _FRONTED, _NEVER = range(6)


def legible(text: str) -> str:
    """Replaces unusual characters (full width, typographic minus, ½, π, √, ²) and words ("72 squared", "pi"),
    removes colours and invisible characters."""
    text = _COLOR.sub("", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2] or root[3]}}}", text)
    if not text.isascii():
        text = _EXPONENT.sub(_power, text).translate(_CHARACTERS)
        text = _DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text)
        text = _SCRIPTS.sub(" ", text)
    return replaced(_BASE.sub(_index, text), _IN_WORDS)


def _index(base: re.Match[str]) -> str:
    name = next(filter(None, base.groups())).lower()
    return "" if name in {"10", "ten"} else f"_{{{number_words.value_of_word(name) or name}}}"


def _power(raised: re.Match[str]) -> str:
    exponent = raised[0].translate(_RAISED)
    return f"^{exponent}" if len(exponent) == 1 else f"^{{{exponent}}}"


def in_digits(text: str) -> str:
    r"""Writes 1.5e3 as 1500, and 0.1\overline{6} and 0.1666… as \frac{1}{6}."""
    return _REPEATING.sub(_fraction, _SCIENTIFIC.sub(lambda number: f"{Decimal(number[0]):f}", text))


def _fraction(decimal: re.Match[str]) -> str:
    whole = decimal[1]
    once = decimal[2] or decimal[4] or ""
    repeated = decimal[3] or decimal[5]
    value = Fraction(int(repeated), 10 ** len(repeated) - 1) + int((whole + once) or 0)
    value /= 10 ** len(once)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


@lru_cache(maxsize=64)  # a place of a response is read several times
def plain(text: str) -> str:
    """Converts LaTeX and Markdown to plain text, as far as parsing numbers needs it."""
    text = _POWER_OF_TEN.sub(
        lambda match: f"{Decimal(f'{match[1]}e{match[2] or match[3]}'):f}", in_digits(text)
    )
    return _IN_PARTS.sub(_in_one_unit, replaced(text, _PLAIN))


def is_in_several_units(latex: str) -> bool:
    """Whether a text is a quantity in several units, which `plain` writes in one: 3 hours 30 minutes."""
    return _IN_PARTS.fullmatch(replaced(latex, _PLAIN).strip()) is not None


def _in_one_unit(parts: re.Match[str]) -> str:
    """A quantity in several units of one kind in the first, largest one: 3 hours 30 minutes is 7/2 hours."""
    quantities = [(Fraction(part[1]), part[2]) for part in _PART.finditer(parts[0])]
    units = [units_of(name) for _, name in quantities]
    ratios = [factor(unit, units[0]) for unit in units if unit[0] is not None]
    sizes = [ratio for ratio in ratios if ratio is not None]
    is_one = len(sizes) == len(quantities) and all(a > b for a, b in itertools.pairwise(sizes))
    if not is_one or any(
        n * size >= before for (n, _), size, before in zip(quantities[1:], sizes[1:], sizes, strict=False)
    ):
        return parts[0]
    total = sum((number * size for (number, _), size in zip(quantities, sizes, strict=True)), Fraction(0))
    return f"{total} {quantities[0][1]}"


def number_in(sentence: str, *, words: bool = False) -> Number | None:
    """Returns the number that a sentence states; None if there is none or two are equally likely.

    Skips operands ("20 + 6 = 26"), bounds ("> 5") and denied numbers ("is not 5"). Uses a circumstance ("in 5
    days", "(24 hours)") only if there is no other number.

    `sentence` is the output of `plain`. `words` also parses "twenty-six", if there are no digits.
    """
    sentence = in_figures(sentence) if words else sentence
    best: tuple[int, int, re.Match[str]] | None = None
    previous = _NEVER
    for index, match in enumerate(list(_NUMBER.finditer(sentence))[-MAX_NUMBERS:]):
        rank = _rank(sentence, match, found=best[0] if best else _NEVER, previous=previous)
        previous = rank
        # Among circumstances the first is preferred, among other numbers the last.
        key = (rank, index if rank == _LESS else -index)
        if rank != _NEVER and (best is None or key < best[:2]):
            best = (*key, match)
    if best is None:
        return None
    rank, _, match = best
    conclusions = list(_CONCLUSION.finditer(sentence, match.end()))
    if conclusions:
        concluded = number_in(sentence[conclusions[-1].end() :])
        is_result = rank == _RESULT_OF
        if not is_statement(sentence[: match.start()], match[0], sentence[match.end() :]):
            return concluded
        if is_result and concluded is not None and not concluded.equals(_value(match, sentence) or concluded):
            return concluded
    before = sentence[max(0, match.start() - MAX_CHARS_BEFORE) : match.start()]
    is_one_of_several = bool(
        _NUMBER_AND.search(before)
        or _AND_NUMBER.match(sentence, match.end())
        or _differs_from_next(sentence, match)
    )
    if _ALSO.search(before) or (is_one_of_several and rank != _RESULT_OF):
        return None
    if not is_statement(before, match[0], sentence[match.end() :]):
        return None
    return _value(match, sentence)


def _differs_from_next(sentence: str, match: re.Match[str]) -> bool:
    """Whether "or" and another quantity follow: "42 apples or 57 apples", not "90 minutes or 1.5 hours"."""
    joint = _OR.match(sentence, match.end())
    other = _NUMBER.match(sentence, joint.end()) if joint else None
    if other is None:
        return False
    value = _value(match, sentence)
    next_value = _value(other, sentence)
    ratio = factor(value.units, next_value.units) if value and next_value else None
    return value is None or next_value is None or ratio is None or not next_value.rounds(value.value * ratio)


def number_and_rest(text: str) -> tuple[str, str]:
    """The first number in a text and what follows it; the text and nothing if it has none."""
    match = _NUMBER.search(text)
    return (match[0], text[match.end() :]) if match else (text, "")


def in_figures(text: str) -> str:
    """A text with its numbers in words in digits, if it has no digits."""
    if re.search(r"\d", text):
        return text
    return replaced(replaced(number_words.in_figures(text), _FRACTIONS), _IN_WORDS)


def measure(text: str, *, has_unit: bool = True) -> Number | None:
    """Parses a text that is only a number, perhaps with a unit, such as "$18 per day."; else None.

    `text` is the output of `plain`. `has_unit`: words after the number are its unit.
    """
    text = re.sub(r"^(?:[\s=]|\$(?!\s?[\d.]))*(?:approximately|about|only|exactly|~)?\s*", "", text)
    match = _NUMBER.match(text)
    if match is None or match["stuck"]:
        return None
    rest = _UNIT if has_unit else _END
    is_only = rest.fullmatch(text, match.end()) and is_asserted("", text[match.end() :])
    return _value(match, text) if is_only else None


def _rank(sentence: str, match: re.Match[str], *, found: int, previous: int) -> int:
    """Rank of a number: the lower, the more likely the sentence states it.

    `found` is the best rank so far, `previous` the rank of the number before.
    """
    since = max(0, match.start() - MAX_CHARS_BEFORE)
    before = sentence[since : match.start()]
    after = sentence[match.end() : match.end() + MAX_CHARS_BEFORE]
    is_operand = _OPERAND_OF.match(after) or _OPERATOR.search(sentence[since : match.start("digits")])
    if match["percent"] and _OF_NUMBER.match(after):
        return _NEVER
    is_named = _NAMED.search(before) or _UNSOLVED.search(before)
    if match["stuck"] or is_operand or is_named or not is_asserted(before, after):
        return _NEVER
    if _RESULT.search(before):
        return _RESULT_OF
    explains = _EXPLANATION.search(before)
    rank = _FAIR if explains and _COPULA.search(before) else _BEST
    if _AMOUNT.search(before):
        rank = _BEST
    elif _ASIDE.search(before) or _ASIDE_OF.match(after):
        rank = _FRONTED if found == _NEVER and len(before.split()) <= 4 else _LESS
    elif (previous == _LESS and _AND.search(before)) or (found <= _BEST and explains):
        rank = _LESS
    return rank


def _value(match: re.Match[str], text: str) -> Number | None:
    """Converts a match of `_NUMBER`; None for a division by zero."""
    digits = match["digits"]
    if re.search(r"\.\d+[.,]", digits):
        digits = digits.replace(".", "").replace(",", ".")
    value = Fraction(digits.replace(",", "").replace(" ", ""))
    if match["under"]:
        if int(match["under"]) == 0:
            return None
        whole, over = (value, Fraction(int(match["mixed"]))) if match["mixed"] else (Fraction(0), value)
        value = whole + over / int(match["under"])
    value *= SCALES.get((match["scale"] or "").lower(), 1)
    value = -value if match["minus"] or match["inner"] else value
    return Number(value, bool(match["percent"]), units_of(_currency(match) + text[match.end() :]))


def _currency(match: re.Match[str]) -> str:
    """The name of the currency whose sign precedes a number; the dollar sign may begin a formula."""
    name = next((name for sign, name in _CURRENCIES.items() if sign in match[0]), "")
    is_formula = name == "dollar" and _FORMULA_END.match(match.string, match.end())
    return "" if is_formula else name


def calculate(expression: str, numbers: list[Fraction] | None = None) -> Fraction | None:
    """The value of plain arithmetic, whose numbers are appended to `numbers`; None for any other text.

    `expression` is the output of `plain`; signs of currency are ignored.
    """
    shown = re.sub(r"^\s*-\s+|[$€£¥]|(?<=\d),(?=\d{3})", "", expression).translate(SIGNS).strip()
    try:
        return _value_of(ast.parse(shown, mode="eval").body, [] if numbers is None else numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value_of(node: ast.expr, numbers: list[Fraction]) -> Fraction:
    """Evaluates plain arithmetic and appends its numbers to `numbers`."""
    match node:
        case ast.Constant(value=int() | float() as value):
            numbers.append(Fraction(str(value)))
            return numbers[-1]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value_of(operand, numbers)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value_of(left, numbers), _value_of(right, numbers))
    raise ValueError(f"not plain arithmetic: {ast.dump(node)[:80]}")
