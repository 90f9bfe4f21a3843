r"""Detects expressions that are too large to compute, from their text, before sympy parses them.

sympy computes exactly: `9^{9^{9}}` never finishes, nor does the expansion of `(x+1)^{100000}`. This module
estimates the size of an expression bottom-up, in time linear in its length:

    formula ──▶ tokens ──▶ `Size` of every part ──▶ within the limits?

A symbol counts as a number of about 3. Unknown commands are treated as symbols, so every text has a size.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

#: Maximum decimal digits of a value and its denominator together. Python prints integers up to 4300 digits.
MAX_DIGITS = 4000
#: Maximum terms of an expanded polynomial; maximum degree of one that must be expanded or divided.
MAX_TERMS, MAX_DEGREE = 2000, 300
#: Maximum terms of `\sum` and `\prod`, and of those without a closed form (nested, or with functions).
MAX_ITERATIONS, MAX_HARD_ITERATIONS = 20_000, 50
#: Maximum depth of nested brackets, and of brackets that open directly inside each other: the time of the
#: LaTeX parser grows exponentially with the latter.
MAX_DEPTH, MAX_BARE_DEPTH = 24, 5
#: Maximum depth of nested exponents.
MAX_TOWERS = 6
#: Maximum characters and tokens of one formula.
MAX_CHARS, MAX_TOKENS = 2000, 500
#: Maximum number of integrals and limits in one formula; maximum tokens of a formula with any of them.
MAX_CALCULUS, MAX_CALCULUS_TOKENS = 2, 40
#: Maximum number of unions and intersections in one formula.
MAX_SET_OPERATIONS = 16

_SYMBOL_DIGITS = 0.5
#: Terms assumed for an infinite sum: sympy finds a closed form or leaves the sum unevaluated.
_INFINITE = 3.0
#: Upright text: the LaTeX parser interprets `\operatorname{gamma}` as the function.
_UPRIGHT = re.compile(r"\\(?:operatorname|text\w*|math\w+|mbox|hbox)\*?\s*\{([^{}]*)\}")
_TOKEN = re.compile(
    r"(?P<skip>\\(?:left|right|[bB]igg?[lrm]?|displaystyle|q?quad|limits|nolimits)(?![A-Za-z])|\\[,!;: ]"
    r"|\\?[\s$~&%])"
    r"|(?P<number>\d+(?:(?:,|\{,\}|\\,|\\!)\d{3}(?!\d))*(?:\.\d+)?|\.\d+)"
    r"|(?P<command>\\[A-Za-z]+|\\.)"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<power>\*\*|\^)"
    r"|(?P<sign>.)",
    re.DOTALL,
)
_OPENING = frozenset({*"([{", r"\{", r"\lfloor", r"\lceil"})
_CLOSING = frozenset({*")]}", r"\}", r"\rfloor", r"\rceil"})
_SET_OPERATIONS = frozenset({r"\cup", r"\cap"})
_CALCULUS = frozenset({r"\int", r"\iint", r"\iiint", r"\oint", r"\lim"})
_PLUS = frozenset({*"+-−", r"\pm", r"\mp"}) | _SET_OPERATIONS
_OVER = frozenset({*"/÷", r"\div"})
_TIMES = frozenset({*"*·×", r"\cdot", r"\times", r"\ast", r"\bmod", r"\mod", r"\pmod"})
_LISTING = frozenset({*",;:=<>", r"\\", r"\le", r"\leq", r"\ge", r"\geq", r"\ne", r"\neq"})
_FUNCTION = re.compile(
    r"\\(?:sqrt|(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|cot|sec|csc|ln|log|exp|lfloor|lceil|gcd|Gamma|sum|prod)"
)
_CONSTANTS = {"\\pi": math.log10(math.pi), "pi": math.log10(math.pi), "e": math.log10(math.e)}


class _TooLarge(Exception):
    """A part of an expression exceeds the limits."""


def is_too_large(formula: str) -> bool:
    """Whether a formula is too large to compute exactly."""
    if len(formula) > MAX_CHARS:
        return True
    found = ((match.lastgroup or "", match[0]) for match in _TOKEN.finditer(_UPRIGHT.sub(r" \1 ", formula)))
    tokens = [token for token in found if token[0] != "skip"]
    signs = Counter(token for _, token in tokens)
    calculus = sum(signs[sign] for sign in _CALCULUS)
    if (
        len(tokens) > (MAX_CALCULUS_TOKENS if calculus else MAX_TOKENS)
        or calculus > MAX_CALCULUS
        or sum(signs[sign] for sign in _SET_OPERATIONS) > MAX_SET_OPERATIONS
    ):
        return True
    try:
        _Reader(tokens).read()
    except (_TooLarge, RecursionError):
        return True
    return False


@dataclass(frozen=True, slots=True)
class Size:
    """Upper bounds for one part of an expression.

    Raises:
        _TooLarge: a bound exceeds its limit.
    """

    digits: float  # log10 of the magnitude, at least 0
    below: float = 0.0  # log10 of the denominator; 0 for an integer
    terms: float = 1.0  # of the expanded polynomial; 1 for a number
    degree: float = 0.0  # of the polynomial; 0 for a number
    symbols: frozenset[str] = frozenset()  # that it contains

    def __post_init__(self) -> None:
        if not (self.digits + self.below <= MAX_DIGITS and self.terms <= MAX_TERMS):
            raise _TooLarge

    @property
    def value(self) -> float:
        """Upper bound of the magnitude; inf if it exceeds the range of floats."""
        return 10.0**self.digits if self.digits < 300.0 else math.inf

    def plus(self, other: Size) -> Size:
        """Size of the sum or difference."""
        high, low = max(self.digits, other.digits), min(self.digits, other.digits)
        symbols = self.symbols | other.symbols
        return Size(
            high + math.log10(1.0 + 10.0 ** (low - high)),
            self.below + other.below,
            self.terms + other.terms if symbols else 1.0,
            max(self.degree, other.degree),
            symbols,
        )

    def times(self, other: Size) -> Size:
        """Size of the product."""
        degree, symbols = self.degree + other.degree, self.symbols | other.symbols
        terms = min(self.terms * other.terms, _num_monomials(degree, len(symbols)))
        return Size(self.digits + other.digits, self.below + other.below, terms, degree, symbols)

    def over(self, other: Size) -> Size:
        """Size of the quotient; a nonzero rational number is at least 1/denominator."""
        if self.terms > 1.0 and other.terms > 1.0 and self.degree > MAX_DEGREE:  # (xⁿ − 1) / (x − 1)
            raise _TooLarge
        return self.times(replace(other, digits=other.below, below=other.digits))

    def to_the(self, exponent: Size) -> Size:
        """Size of the power, for an exponent of either sign."""
        power, larger = exponent.value, max(self.digits, self.below)
        digits = larger * power if larger else 0.0
        degree = self.degree * (1.0 if exponent.symbols or not self.degree else power)
        symbols, terms = self.symbols | exponent.symbols, self.terms
        if terms > 1.0 and power > 1.0:
            if degree > MAX_DEGREE:
                raise _TooLarge
            terms = _num_monomials(degree, len(symbols))
        return Size(digits, digits if self.below else 0.0, terms, degree, symbols)

    def factorial(self) -> Size:
        """Size of n!, which also bounds Γ(n)."""
        if self.value > MAX_DIGITS:  # from 25 on, n! has more than n digits
            raise _TooLarge
        return Size(math.lgamma(self.value + 1.0) / math.log(10.0), symbols=self.symbols)

    def choose(self, lower: Size) -> Size:
        """Size of the binomial coefficient: at most 2ⁿ, and at most nᵏ."""
        digits = min(self.value * math.log10(2.0), lower.value * self.digits)
        return Size(digits, symbols=self.symbols | lower.symbols)


def _num_monomials(degree: float, num_symbols: int) -> float:
    """Number of monomials up to a degree, C(degree + symbols, symbols); inf if certainly above the limit."""
    if degree > 2 * MAX_DIGITS:
        return math.inf
    return float(min(math.comb(math.ceil(degree) + num_symbols, num_symbols), 10**9))


class _Reader:
    """Recursive descent over the tokens of a formula."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0  # open brackets
        self._bare_depth = 0  # open brackets that another bracket directly follows
        self._towers = 0  # open exponents
        self._iterations = 1.0  # terms of all open sums and products, multiplied
        self._symbol_digits = _SYMBOL_DIGITS

    def read(self) -> None:
        """Estimates the size of the whole formula.

        Raises:
            _TooLarge: a part exceeds the limits.
        """
        self._list()
        while self._at < len(self._tokens):
            self._at += 1  # an unmatched closing bracket
            self._list()

    def _next(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _list(self) -> Size:
        """Parts separated by commas and relations, up to a closing bracket."""
        size = self._sum()
        while self._next() in _LISTING:
            self._at += 1
            size = size.plus(self._sum())
        return size

    def _sum(self) -> Size:
        while self._next() in _PLUS:  # signs
            self._at += 1
        size = self._product()
        while self._next() in _PLUS:
            self._at += 1
            size = size.plus(self._product())
        return size

    def _product(self) -> Size:
        size, divides = Size(0.0), False
        while (token := self._next()) and token not in _CLOSING | _LISTING | _PLUS:
            if token in _OVER or token in _TIMES:
                divides = token in _OVER
                self._at += 1
            elif token == "\\choose":
                self._at += 1
                size = size.choose(self._product())
            else:
                factor = self._power()
                size, divides = size.over(factor) if divides else size.times(factor), False
        return size

    def _power(self) -> Size:
        """An atom with its exponents, indices and factorials."""
        size = self._atom()
        while token := self._next():
            if token == "!":
                self._at += 1
                size = size.factorial()
            elif token in {"^", "**"}:
                self._at += 1
                self._towers += 1
                if self._towers > MAX_TOWERS:
                    raise _TooLarge
                size = size.to_the(self._power())  # right-associative: 9^9^9 is 9^(9^9)
                self._towers -= 1
            elif token == "_":
                self._at += 1
                self._atom()
            else:
                break
        return size

    def _atom(self) -> Size:
        if self._at >= len(self._tokens):
            return Size(0.0)
        kind, token = self._tokens[self._at]
        self._at += 1
        if kind == "number":
            return _number(token)
        if token in _CONSTANTS:
            return Size(_CONSTANTS[token])
        if token in _READERS:
            return _READERS[token](self)
        return Size(self._symbol_digits, degree=1.0, symbols=frozenset({token}))

    def _root(self) -> Size:
        if self._next() == "[":
            self._atom()
        return self._argument()

    def _bracket(self) -> Size:
        is_bare = self._next() in _OPENING
        self._depth += 1
        self._bare_depth += is_bare
        if self._depth > MAX_DEPTH or self._bare_depth > MAX_BARE_DEPTH:
            raise _TooLarge
        size = self._list()
        if self._next() in _CLOSING:
            self._at += 1
        self._depth -= 1
        self._bare_depth -= is_bare
        return size

    def _argument(self) -> Size:
        r"""Argument of a command: a bracket or one token; of a number the first digit, as in \\frac12."""
        kind, token = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        if kind == "number" and len(token) > 1:
            self._tokens[self._at] = (kind, token[1:])
            return _number(token[0])
        return self._atom()

    def _iteration(self, *, is_product: bool = False) -> Size:
        r"""Bounds of a \sum or \prod, and its body, which is evaluated once per term."""
        bounds, start = Size(0.0), self._at
        while self._next() in {"_", "^"}:
            self._at += 1
            bounds = bounds.plus(self._atom())
        is_infinite = ("command", "\\infty") in self._tokens[start : self._at]
        count = math.inf if is_infinite else max(1.0, bounds.value)
        outer = self._iterations, self._symbol_digits
        self._iterations *= count
        self._symbol_digits = max(_SYMBOL_DIGITS, bounds.digits)
        start = self._at
        body = self._product()
        inside = self._tokens[start : self._at]
        is_hard = outer[0] > 1.0 or any(_FUNCTION.fullmatch(token) for _, token in inside)
        if is_hard and self._iterations > MAX_HARD_ITERATIONS:
            raise _TooLarge
        if count < math.inf and self._iterations > MAX_ITERATIONS:
            raise _TooLarge
        count = min(count, _INFINITE)
        self._iterations, self._symbol_digits = outer
        if is_product:
            return body.to_the(Size(math.log10(count)))
        return replace(body, digits=body.digits + math.log10(count), below=body.below * count)


_READERS: dict[str, Callable[[_Reader], Size]] = {
    **dict.fromkeys(_OPENING, _Reader._bracket),
    **dict.fromkeys(_PLUS, _Reader._power),  # a sign
    **dict.fromkeys(
        ("\\frac", "\\dfrac", "\\tfrac", "\\cfrac"),
        lambda of: of._argument().over(of._argument()),
    ),
    **dict.fromkeys(("\\binom", "\\dbinom", "\\tbinom"), lambda of: of._argument().choose(of._argument())),
    **dict.fromkeys(("\\Gamma", "Gamma", "gamma", "factorial"), lambda of: of._argument().factorial()),
    "\\sqrt": _Reader._root,
    "\\sum": _Reader._iteration,
    "\\prod": lambda of: of._iteration(is_product=True),
}


def _number(token: str) -> Size:
    """Size of a number, which may have thousands separators and decimals."""
    whole, _, decimals = re.sub(r"[^\d.]", "", token).partition(".")
    whole = whole.lstrip("0")
    digits = len(whole) - 1 + math.log10(float(f"{whole[0]}.{whole[1:17] or 0}")) if whole else 0.0
    return Size(digits, float(len(decimals)))
