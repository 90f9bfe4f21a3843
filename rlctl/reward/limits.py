r"""Detects expressions that are too large to compute, from their text, before sympy parses them.

sympy computes exactly: `9^{9^{9}}` never finishes, nor does the expansion of `(x+1)^{100000}`. Here the
arithmetic of whole numbers is computed from the inside out, as long as its results are short; powers of
polynomials, sums and products are judged by their number of terms. What this does not detect ends at the
deadline of `rlctl.reward.pool`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

from rlctl.lazy import lazy_pattern
from rlctl.reward.numbers import calculate

#: Maximum decimal digits of a number. Python prints integers up to 4300 digits.
MAX_DIGITS = 4000
#: Maximum terms of an expanded polynomial; maximum power of a symbol.
MAX_TERMS, MAX_DEGREE = 2000, 10_000
#: Maximum terms of all sums and products of a formula, and of those that are nested or have functions.
MAX_ITERATIONS, MAX_HARD_ITERATIONS = 20_000, 50
#: Maximum depth of brackets. The time of the LaTeX parser grows exponentially with the number of brackets
#: that open directly inside each other, of which 7 are too many.
MAX_DEPTH = 24
_BARE = lazy_pattern(r"(?:[({\[]\s*){7}")
#: Maximum characters and tokens of one formula, and tokens of one with integrals or limits.
MAX_CHARS, MAX_TOKENS, MAX_CALCULUS_TOKENS = 2000, 500, 40
#: Maximum number of integrals and limits in one formula, and of unions and intersections.
MAX_CALCULUS, MAX_SET_OPERATIONS = 2, 16

#: What changes no size: thousands separators, sizes of brackets, spaces.
_IGNORED = lazy_pattern(
    r"(?<=\d)(?:,|\{,\}|\\,|\\!)(?=\d{3}(?!\d))|\\[,!;: ]"
    r"|\\(?:left|right|[bB]igg?[lrm]?|displaystyle)(?![A-Za-z])"
)
_TOKEN = lazy_pattern(r"\d+(?:\.\d+)?|\\?[A-Za-z]+|\S")
_CALCULUS = lazy_pattern(r"\\(?:i{0,2}int|oint|lim)(?![A-Za-z])")
#: Functions, and k^k, whose sums have no closed form.
_FUNCTION = lazy_pattern(
    r"\\(?:sqrt|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp|lfloor|lceil|gcd|Gamma)"
    r"|([a-z])\s*\^\s*\{?\s*\1(?![a-z])"
)
_ITERATION = lazy_pattern(
    r"\\(?:sum|prod)\s*_\s*\{?[^{}^=]*=\s*(\d+)\s*\}?\s*\^\s*(?:(\d+)|\{?\s*\\infty\s*\}?)"
)
_BRACKET_POWER = lazy_pattern(r"\(([^()]*)\)\s*\^\s*(\d+)")
_SYMBOL_POWER = lazy_pattern(r"[A-Za-z]\s*\^\s*(\d+)")


class _TooLarge(Exception):
    """A part of an expression exceeds the limits."""


def _checked(digits: float) -> None:
    if digits > MAX_DIGITS:
        raise _TooLarge


def _power(base: int, exponent: int) -> int:
    if base > 1:
        _checked(min(exponent, 1 << 20) * math.log10(base))
    return base**exponent if base > 1 else base


def _factorial(number: int) -> int:
    _checked(math.lgamma(min(number, 1 << 20) + 1.0) / math.log(10.0))
    return math.factorial(number)


def _binomial(upper: int, lower: int) -> int:
    lower = min(lower, abs(upper - lower))
    _checked(min(lower, 1 << 20) * math.log10(max(upper, 1)))
    return math.comb(upper, lower)


def _sum(text: str) -> object:
    """The value of sums and products in brackets, without these."""
    value = calculate(text)
    return text if value is None else abs(int(value))


#: Arithmetic → its value; the last of several powers first.
_COMPUTED: tuple[tuple[re.Pattern[str], Callable[..., object]], ...] = (
    (lazy_pattern(r"[({](?=[\s+*-]*\d)([\d\s+*-]+)[)}]"), _sum),
    (lazy_pattern(r"(?<![\d.])(\d+)\s*\^\s*[-+]?\s*(\d+)(?![\d.]|\s*[\^!])"), _power),
    (lazy_pattern(r"(?<![\d.])(\d+)\s*!"), _factorial),
    (lazy_pattern(r"\b(?:[Gg]amma|factorial)\W{0,3}(\d+)"), _factorial),
    (lazy_pattern(r"\\[dt]?binom\s+(\d+)\s+(\d+)"), _binomial),
    (lazy_pattern(r"(\d+)\s*\\choose\s*(\d+)"), _binomial),
)


def is_too_large(formula: str) -> bool:
    """Whether a formula is too large to compute exactly."""
    tokens = _TOKEN.findall(formula)
    num_calculus = len(_CALCULUS.findall(formula))
    if (
        len(formula) > MAX_CHARS
        or len(tokens) > (MAX_CALCULUS_TOKENS if num_calculus else MAX_TOKENS)
        or num_calculus > MAX_CALCULUS
        or tokens.count("\\cup") + tokens.count("\\cap") > MAX_SET_OPERATIONS
        or _depth(tokens) > MAX_DEPTH
        or _BARE.search(formula)
    ):
        return True
    try:
        return _has_many_terms(_computed(_IGNORED.sub("", formula).replace("**", "^")))
    except (_TooLarge, ValueError):  # Python refuses to print or read a number of too many digits
        return True


def _depth(tokens: list[str]) -> int:
    depth = deepest = 0
    for token in tokens:
        depth = max(0, depth + (token in "([{") - (token in ")]}"))
        deepest = max(deepest, depth)
    return deepest


def _computed(text: str) -> str:
    """The formula with its arithmetic of whole numbers computed."""
    before = ""
    while text != before:
        before = text
        _checked(max(map(len, re.findall(r"\d+", text)), default=0))
        for pattern, compute in _COMPUTED:
            text = pattern.sub(partial(_replaced, compute), text)
    return text


def _replaced(compute: Callable[..., object], found: re.Match[str]) -> str:
    numbers = found.groups() if compute is _sum else map(int, found.groups())
    return f" {compute(*numbers)} "


def _has_many_terms(text: str) -> bool:
    """Whether sums, products or powers of polynomials have too many terms."""
    counts = [int(last) - int(first) + 1 if last else math.inf for first, last in _ITERATION.findall(text)]
    is_hard = len(counts) > 1 or _FUNCTION.search(text)
    finite = math.prod(count for count in counts if count < math.inf)
    if finite > MAX_ITERATIONS or (is_hard and math.prod(counts) > MAX_HARD_ITERATIONS):
        return True
    for inner, power in _BRACKET_POWER.findall(text):
        num_symbols = len(set(re.findall(r"(?<!\\)[A-Za-z]", inner))) if re.search("[-+]", inner) else 0
        if math.comb(min(int(power), MAX_DEGREE) + num_symbols, num_symbols) > MAX_TERMS:
            return True
    return any(int(power) > MAX_DEGREE for power in _SYMBOL_POWER.findall(text))
