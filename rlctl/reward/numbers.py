"""Numbers in prose: how people write them, and which one of a sentence it is about."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"))
_SPACES = dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u202f\u3000"), " ")
_SIGNS = dict.fromkeys(map(ord, "\u2212\u2010\u2011\ufe63"), "-") | {0x2044: "/"}
_VULGAR = {ord(c): " " + unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_CHARACTERS = _FULL_WIDTH | _INVISIBLE | _SPACES | _SIGNS | _VULGAR

#: LaTeX and Markdown as the plain text they show, in this order.
_PLAIN = [
    (re.compile(pattern), text)
    for pattern, text in (
        (r"(?<=\d)(?:\\[,!: ]|\{,\}|,\\!|~)(?=\d{3}(?!\d))", ""),
        (r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2 "),
        (r"\\[dtc]?frac\s*(\d)\s*(\d)", r" \1/\2 "),
        (r"\\(?:text\w*|math\w+|mbox|boldsymbol|operatorname|boxed|fbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:times|cdot|ast)(?![a-z])", " * "),
        (r"\\div(?![a-z])", "/"),
        (r"\\(?:approx|simeq|implies|to|[Rr]ightarrow|Longrightarrow)(?![a-z])|[≈→⇒]|=>|->", "="),
        (r"\^\{?\\circ\}?|\\degree|°", " degrees "),
        (r"\\([$%#&])", r"\1"),
        (r"\\(?:left|right|quad|qquad|displaystyle|textbf)(?![a-z])|\\[\[\](),;:!> ]", " "),
        (r"\*\*+|__+|`+|~~|(?<!\S)\*(?=\S)|(?<=\S)\*(?!\S)", ""),
        (r"(\d) dollars? and (\d\d) cents?\b", r"\1.\2 dollars"),
        (r"(?<=\d):00\b", ""),
        (r"(?<![\w.])\s?\u2013(?=[$\d])", " -"),
    )
]

_DIGITS = (
    r"(?:\d{1,3}(?:\.\d{3})+,\d{1,2}(?!\d)"  # 1.234,00
    r"|\d{1,3}(?:[, ]\d{3})+(?![\d,]|-[a-z])(?:\.\d+)?"  # 1,234.00 and 1 234
    r"|\d+(?:\.\d+)?|\.\d+)"
)
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NUMBER = re.compile(
    r"(?<![\w.])(?P<minus>(?:(?<![\w)])-(?=[$€£¥₹\d.]))?)(?:US)?[$€£¥₹]*\s?(?P<inner>-?)"
    rf"(?P<digits>{_DIGITS})(?:(?P<mixed>\s+\d+)?\s?/\s?(?P<under>\d+)(?!\d|\.\d))?"
    rf"(?:\s?(?P<scale>{'|'.join(_SCALES)})s?\b)?(?P<percent>\s?(?:%|per ?cent\b))?"
    r"(?P<stuck>(?:st|nd|rd|th)\b|:\d)?",
    re.IGNORECASE,
)
_UNITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
_TEENS = ["twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = dict(zip([*_UNITS, *_TEENS, *_TENS], [*range(20), *range(20, 100, 10)], strict=True))
_WORD = re.compile(rf"\b({'|'.join(_WORDS)})(?:[- ]({'|'.join(_UNITS[1:10])}))?\b", re.IGNORECASE)

#: After a number: its unit, and nothing else.
_UNIT = re.compile(
    r"(?!\s*(?:pi|sqrt|or|and|log|ln|sin|cos|tan|mod|x|i|e)\b)"
    r"(?:\s*(?:[/$%¢-]\s*)?[A-Za-z]{2,}\b\.?|\s*/\s*[A-Za-z]\b|\s+[cCdgGhKLlmsVWN]\b|\s*[/$¢%€£'\"]|\s*[a-z]+\^\d)*[\s.)}\]$*]*"
)
#: After a number: it is an operand, not a result.
_OPERAND_OF = re.compile(
    r"\s*(?:[A-Za-z]+(?:/[a-z]+)?\s+|[A-Za-z]+(?=/))?[)\]]*\s*(?:[-+*/×÷·^=]|x(?=[\s\d]))\s*[(\[$€£-]*\s*\.?\d|\(\s*\.?\d"
)
#: Before a number: likewise.
_OPERATOR = re.compile(r"[\d)%]\s*(?:[A-Za-z]+\s+)?(?:[-+*/×÷·^(]|(?<=[\d\s])x)\s*[($€£-]*\s*$")
_RESULT = re.compile(
    r"(?:=|\b(?:which|that|it) (?:is|was|equals|makes)|\brounds?(?: up| down| off)? to|\bmeaning)\s+"
    r"(?:about\s+)?[($€£-]*\s*$"
    r"|=[($€£-]*$"
)
_FEW = (
    r"(?:(?:the|an?|all|his|her|their|its|these|those|just|only|about|another|each|next|first|last|of"
    r"|\$)\s*)*$"
)
_MAY_BE = r"(?<!need )(?<!needs )(?<!able )(?<!has )(?<!have )(?<!had )(?<!going )"
#: Before a number that is there for the circumstances ("in 5 days") or for a purpose ("to make 2 robes").
_ASIDE = re.compile(
    r"\b(?:(?:in|after|for|per|every|over|on|by|at|from|during|within|than|with|between|until|before|of|when)"
    rf"(?:\s+[a-z]+ing)?|or|{_MAY_BE}to\s+[a-z]+|from\b[^,]*\bto|day|week|month|year|step|part|question|grade|page"
    rf"|number|#)\s+{_FEW}|\b(?:the|these|those)\s+$|\bthe (?-i:[A-Z])[a-z]+\s+$",
    re.IGNORECASE,
)
#: After one of these: "4 years from now", "5 PM".
_ASIDE_OF = re.compile(r"\s*(?:[ap]\.?m\b|\w+\s+(?:ago|later|from now|earlier)\b)|-[A-Za-z]", re.IGNORECASE)
#: Unless it says how much it comes to.
_AMOUNT = re.compile(
    r"\b(?:total|sum|average|cost|price|profit|loss|amount|earnings|savings|speed|rate|balance|maximum|minimum"
    rf"|equal|comes?|came|amounts?|adds? up|up|left|ends? up)\s+(?:of|at|to|with|by)\s+{_FEW}",
    re.IGNORECASE,
)
#: Between two numbers that are there for the same reason: "for 5 dogs and 3 cats".
_AND = re.compile(r"\d\S*(?:\s+[a-z]+){0,3}\s+and\s+$")
_COPULA = re.compile(r"\b(?:is|are|was|were|be)\s+[($€£-]*$")
#: Begins what only explains the rest of the sentence.
_EXPLANATION = re.compile(
    r"\b(?:because|since|as (?:she|he|it|they|there)|given|assuming|if|when|while|whereas|than|compared|after"
    r"|before|once)\b|[(]|\bto [a-z]+\b[^,;]*$"
)
#: Numbers of a sentence that are looked at, the last ones.
MAX_NUMBERS = 64
#: How far around a number is looked.
MAX_CHARS_BEFORE = 200
_RESULT_OF, _BEST, _FAIR, _LESS, _FRONTED, _NEVER = range(6)


def legible(text: str) -> str:
    """The text with odd characters (full width, invisible, typographic minus, ½) as plain ones."""
    return text.translate(_CHARACTERS)


def plain(text: str) -> str:
    """LaTeX and Markdown as the text they show, as far as numbers need it."""
    for pattern, shown in _PLAIN:
        text = pattern.sub(shown, text)
    return text


def number_in(sentence: str, *, words: bool = False) -> str | None:
    """The number a sentence ends up with, as LaTeX; None when there is none.

    Not an operand ("20 + 6 = 26"), nor one in passing ("in 5 days", "(24 hours)") if there is another.

    Args:
        sentence: as `plain` returns it.
        words: also read "twenty-six", where there are no digits.
    """
    if words and not re.search(r"\d", sentence):
        sentence = _WORD.sub(
            lambda word: str(_WORDS[word[1].lower()] + _WORDS.get((word[2] or "").lower(), 0)), sentence
        )
    best: tuple[int, int, str] | None = None
    previous = _NEVER
    for place, match in enumerate(list(_NUMBER.finditer(sentence))[-MAX_NUMBERS:]):
        rank = _rank(sentence, match, found=best[0] if best else _NEVER, previous=previous)
        previous = rank
        # Of those in passing the first, of the others the last.
        key = (rank, place if rank == _LESS else -place)
        if rank != _NEVER and (best is None or key < best[:2]):
            best = (*key, _latex(match))
    return best[2] if best else None


def measure(text: str) -> str | None:
    """The number, as LaTeX, of a text that is a number and perhaps a unit, such as "$18 per day."; else None.

    Args:
        text: as `plain` returns it.
    """
    text = re.sub(r"^[\s$({\[]*(?:[A-Za-z]\s*=|=|approximately|about|only|exactly|~|:)?\s*", "", text)
    match = _NUMBER.match(text)
    if match is None or match["stuck"]:
        return None
    return _latex(match) if _UNIT.fullmatch(text, match.end()) else None


def _rank(sentence: str, match: re.Match[str], *, found: int, previous: int) -> int:
    """How much a number looks like what the sentence says; `found` and `previous`: the best and last rank."""
    since = max(0, match.start() - MAX_CHARS_BEFORE)
    before, after = sentence[since : match.start()], sentence[match.end() : match.end() + MAX_CHARS_BEFORE]
    is_operand = _OPERAND_OF.match(after) or _OPERATOR.search(sentence[since : match.start("digits")])
    if match["stuck"] or is_operand or re.search(r"\bnot\s*$", before):
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


def _latex(match: re.Match[str]) -> str:
    digits = match["digits"]
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+,\d{1,2}", digits):
        digits = digits.replace(".", "").replace(",", ".")
    digits = digits.replace(",", "").replace(" ", "")
    if match["scale"] or match["under"]:
        value = Fraction(digits) if not match["mixed"] else Fraction(int(match["mixed"]))
        if match["under"]:
            if int(match["under"]) == 0:
                return f"{digits}/0"
            value /= int(match["under"])
            value += Fraction(digits) if match["mixed"] else 0
        digits = str(value * _SCALES.get((match["scale"] or "").lower(), 1))
    sign = "-" if match["minus"] or match["inner"] else ""
    return sign + digits + ("\\%" if match["percent"] else "")
