"""Parses and compares mathematical expressions with math-verify.

The parser gets one expression at a time, and the text must parse as a whole. math-verify's own search for an
answer is not used, because it would extract a number from a text that does not parse.

Importing this module takes most of a second, because it imports sympy.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import latex2sympy2_extended
import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import grader

from rlctl.lazy import lazy_pattern
from rlctl.reward.limits import is_too_large
from rlctl.reward.numbers import SCALES, Number, in_digits, replaced, replacements

#: Texts that the parser misreads: times of day (6:30 as 1/5), ratios (1:2:3 as 1/6),
#: feet and arc minutes (5'6'' as 56), sums with dots (it drops the dots), numbers side by side (3 4 as 7).
_NO_EXPRESSION = lazy_pattern(
    r"\d{1,2}:\d\d(?!\d)|.*\d\s*'|.*:.*:|.*\\[lcd]?dots|.*\.\.\.[,+]"
    r"|.*(?<![_^])(?<!frac )(?<!binom )\d(?:\\[ ,;:!]|\\q?quad|[\s~])+\d",
    re.DOTALL,
)
#: An operator at the end: a formula that is cut off.
_UNFINISHED = lazy_pattern(r"(?:[-+*/=^(]|\\(?:times|cdot|div|pm|mp|cup|cap|frac|sqrt)(?![a-z]))[\s~]*$")
_INTEGERS = r"\\[dtc]?frac\s*(?:\{\s*\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|\d)"
#: A matrix as programs write it: [[1,2],[3,4]].
_NESTED_LIST = lazy_pattern(r"\[\s*(\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*)\s*\]")
#: A difference, or a range if the second number is larger: 50-8, 3-5.
_RANGE = lazy_pattern(r"\s*(\d+)\s*-\s*(\d+)\s*$")
#: A mixed number: 2\frac{3}{4}, 2 3/4.
_MIXED = lazy_pattern(
    r"(?<![\w.^_\\}])(?<!\d,)(?<!frac )(\d+)(?:\\[ ,;:!]|[\s~])*"
    rf"({_INTEGERS}|(?<=[\s~])\d+\s*/\s*\d+(?!\d))"
)
#: A product without its sign, which the parser would read as a mixed number: 3(4), (3)(4).
_PRODUCT = lazy_pattern(
    r"((?:(?<![\w.^_\\])|(?<=\\cdot)|(?<=\\times))\d+|\))\s*"
    rf"(?=(?:\\left\s*)?\(\s*(?:\d+(?:\s*/\s*\d+)?|{_INTEGERS})\s*(?:\\right\s*)?\))"
)
#: A system of equations, and the ends of its lines.
_SYSTEM = lazy_pattern(
    r"(?:\\left\s*)?(?:\\\{\s*)?\\begin\{(?:cases|array|aligned)\}(?:\{[lcr]+\})?"
    r"([^&]*?)\\end\{(?:cases|array|aligned)\}(?:\s*\\right\s*\.)?"
)
_ROW_END = lazy_pattern(r"[,;\s]*\\\\\s*(?=\S)")
_OR = lazy_pattern(r"\s*(?:\bor\b|\\(?:text\w*|mbox|hbox|mathrm)\s*\{\s*or\s*\})\s*")
#: The index of a name: of x_1 and x_{12}.
_INDEX = lazy_pattern(r"_\{?\d+\}?$|(?<=[A-Za-z])\d+$")
_PRIMES = lazy_pattern(r"([A-Za-z])\s*('+)")
_NOTATIONS = replacements("of_parser")
#: Upright text that may be a unit, with its power; "or more" is not one.
_UPRIGHT = (
    rf"\\(?:text\w*|mbox|hbox|mathrm)\s*\{{(?!\W*(?:or|and|is|isn|are|not|no|if|when|else|but|wrong|plus|minus|times|{'|'.join(SCALES)})\b)"
    r"(?:[^{}]|\{[^{}]*\})*\}(?:\s*\^\s*\{?-?\d\}?)?"
)
_LETTERS = r"\s*(?:[ckm]?m|[mk]?g|mi|ft|in|km|lb|kJ|J|N|L)(?:\s*\^\s*\{?\d\}?)?\s*"
_PER = r"\s*(?:[hs]|hr|min|sec|[ckm]?m|L|kg|mol)(?:\s*\^\s*\{?\d\}?)?\s*"
#: Units after an expression: text with its power, and degrees.
_UNITS = lazy_pattern(
    rf"(?:\\[ ,;:!]|[\s~])*(?:(?:{_UPRIGHT}(?:\s*\\cdot\s*{_UPRIGHT})?"
    rf"|\\[dt]?frac\s*\{{{_UPRIGHT}\}}\s*\{{{_UPRIGHT}\}}"
    rf"|(?<=\d)\s+\\[dt]?frac\s*\{{{_LETTERS}\}}\s*\{{{_PER}\}})"
    r"|\^\s*\{?\s*\\circ\s*\}?|\\degree|°)[\s.]*$"
)
#: Degrees, after a number or letter or after any other term.
_DEGREE = (
    r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])|°"
    r"|(?:\\(?:text|mathrm|mbox)\s*\{\s*)?\bdegrees?\b\s*\}?)"
)
_OF_NUMBER = lazy_pattern(r"(\d+(?:\.\d+)?|(?<![A-Za-z\\])[A-Za-z])" + _DEGREE)
_OF_TERM = lazy_pattern(_DEGREE)
#: A logarithm without a base.
_LOG = lazy_pattern(r"\\log(?![a-z]|\s*_)")
#: A text that is a number as programs print it, or 2e − 3.
_AMBIGUOUS = lazy_pattern(r"^\s*(\d+)[eE]([-+]?\d)\s*$")
#: Text that cannot precede a unit.
_OPEN = lazy_pattern(r"(?:[-+*/=<>^_(,;:|&]|\\(?!pi|infty|circ|degree)[A-Za-z]+)\s*$")
# `units=False`, because math-verify's list of units includes single letters: it would turn 3t into 3.
_NORMALIZATION = latex2sympy2_extended.NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)  # R is not r
# Hides the warning that math-verify's time limits are off. They are off because they need the main thread and
# cannot interrupt integer arithmetic.
logging.getLogger("math_verify.grader").setLevel(logging.ERROR)
#: Numbers up to this one may be factors of a logarithm; see `_has_log_and_large_number`.
_LARGEST_FACTOR = 10_000
#: Maximum difference of equal decimals, and the same relative to the larger value.
ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE = 5e-7, 1e-4
#: Values of up to three names at which formulas with roots are compared, and how many must be real.
_POINTS = [
    tuple(sympy.Rational(sign * number, 7) for sign, number in zip(signs, numbers, strict=True))
    for numbers in ((3, 11, 17), (19, 5, 9), (2, 23, 13))
    for signs in ((1, 1, 1), (-1, -1, -1), (1, -1, 1), (-1, 1, -1))
]
_MIN_REAL_POINTS = 3
#: Digits with which irrational numbers are compared; half of them must agree.
PRECISION = 80


def read(latex: str) -> Any | None:
    """Parses the whole text as one expression.

    Returns None if the text does not parse, has no value (1/0), or is too large to compute.
    """
    text = replaced(latex.strip().strip("$").rstrip(". "), _NOTATIONS)
    nested = _NESTED_LIST.fullmatch(text.strip())
    if nested:
        rows = [row.replace(",", " & ") for row in re.findall(r"\[([^\[\]]*)\]", nested[1])]
        text = r"\begin{pmatrix}" + r"\\ ".join(rows) + r"\end{pmatrix}"
    text = _SYSTEM.sub(lambda system: _ROW_END.sub(", ", system[1]), in_digits(text)).strip()
    text = _PRODUCT.sub(r"\1\\cdot ", _MIXED.sub(r"(\1+\2)", text))
    if not text or _NO_EXPRESSION.match(text) or is_too_large(text):
        return None
    ends = _RANGE.match(text)
    if ends and int(ends[1]) < int(ends[2]):
        return None
    text = _PRIMES.sub(lambda match: f"{match[1]}_{{p{len(match[2])}}}", text)
    parts = _OR.split(text)
    if len(parts) > 1:
        sets = [_solutions(_parsed(part)) for part in parts]
        if all(isinstance(one, sympy.Set) for one in sets):
            return sympy.Union(*sets)
    expression = _parsed(text)
    if expression is None and text.count("\\pm") == 1:  # the parser does not support it inside a fraction
        both = [_parsed(re.sub(r"\\pm(?![a-z])", sign, text)) for sign in "+-"]
        return None if None in both else sympy.FiniteSet(*both)
    return expression


@lru_cache(maxsize=4096)  # parsing takes most of the time, and the responses to a prompt are often alike
def _parsed(text: str) -> Any | None:
    try:
        expression = latex2sympy2_extended.latex2sympy(
            text, is_real=True, normalization_config=_NORMALIZATION, conversion_config=_CONVERSION
        )
        is_equation = isinstance(expression, sympy.Eq)
        value = expression.rhs if is_equation else expression
        if {symbol.name for symbol in value.free_symbols} == {"i"}:
            value = value.subs(dict.fromkeys(value.free_symbols, sympy.I))
            expression = sympy.Eq(expression.lhs, value, evaluate=False) if is_equation else value
        return None if expression.has(sympy.zoo, sympy.nan) else expression
    except MemoryError:
        raise
    except Exception:  # the parser raises plain `Exception` for invalid LaTeX
        return None


def _solutions(inequality: Any) -> Any:
    """The numbers for which an inequality solved for a name holds; any other expression unchanged."""
    parts = inequality.args if isinstance(inequality, sympy.And) else [inequality]
    for part in parts:
        if not isinstance(part, sympy.Rel) or isinstance(part, sympy.Eq):
            return inequality
        if len(list(filter(is_closed_number, part.args))) != 1 or not any(map(_is_name, part.args)):
            return inequality
    return inequality.as_set() if len(inequality.free_symbols) == 1 else inequality


def _is_name(side: Any) -> bool:
    """Whether one side of an inequality is a name, or the distance of a name to a number."""
    if isinstance(side, sympy.Abs):
        return (
            len(side.free_symbols) == 1 and side.args[0].is_polynomial() and sympy.degree(side.args[0]) == 1
        )
    return bool(side.is_Symbol)


def in_other_notation(latex: str) -> str:
    r"""Writes degrees in radians, `\log` without a base, which may be natural, as `\ln`, 2e-3 as 2·10⁻³."""
    latex = _AMBIGUOUS.sub(r"\1\\cdot 10^{\2}", latex)
    latex = _OF_NUMBER.sub(r"{\\frac{\1\\pi}{180}}", _LOG.sub(r"\\ln", latex))
    return _OF_TERM.sub(r"\\cdot\\frac{\\pi}{180}", latex)


def is_unfinished(latex: str) -> bool:
    """Whether a formula ends with an operator."""
    return bool(_UNFINISHED.search(latex.rstrip(" .")))


def without_units(latex: str) -> str:
    r"""Removes units at the end: `\text{…}` with its power, and degrees."""
    while (match := _UNITS.search(latex)) and match.start() and not _OPEN.search(latex[: match.start()]):
        latex = latex[: match.start()]
    return latex


def equal(gold: Any, answer: Any) -> bool:
    """Whether math-verify finds two expressions equal and they are of the same kind.

    Args:
        gold: the parsed ground truth.
        answer: the parsed answer. The right side of an equation is compared only if the left side names the
            requested quantity ("m + n = 7") or equals the gold; "y - 3 = 0" does not equal 0.
    """
    gold, answer = _named_values(gold, answer), _named_values(answer, gold)
    try:
        if _is_system(gold) != _is_system(answer) or (
            _is_vector(gold) != _is_vector(answer) and not (_is_matrix(gold) and _is_matrix(answer))
        ):
            points = _point(gold) or [], _point(answer) or []
            return len(points[0]) == len(points[1]) > 0 and all(map(_verify, *points))
        return _equal(gold, answer)
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return False  # sympy cannot compare them


def _equal(gold: Any, answer: Any) -> bool:
    gold, answer = _unnamed(gold, answer), _unnamed(answer, gold)
    if isinstance(gold, sympy.Interval | sympy.Union):
        answer = _solutions(answer)
    elif isinstance(answer, sympy.Interval | sympy.Union | sympy.Complement):
        gold = _solutions(gold)
    is_relation = _is_relation(gold)
    if is_relation and not _is_relation(answer) and not _has_value(gold, answer):
        return False
    both_are_equations = isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq)
    if both_are_equations and _are_proportional(gold, answer):
        return True
    equations = [] if is_relation else _equations(answer)
    if not all(_names(left) or _verify(gold, left) for left in equations) or not _verify(gold, answer):
        return False
    if (_is_list(gold) and _is_pair(answer)) or (_is_list(answer) and _is_pair(gold)):
        return False  # math-verify ignores the order of a pair
    if both_are_equations and all(
        isinstance(side, sympy.Expr) for one in (gold, answer) for side in one.args
    ):
        return not gold.has(sympy.Derivative) and bool(sympy.solve(gold))  # math-verify treats dy/dx as 0
    return True


def _are_proportional(gold: Any, answer: Any) -> bool:
    """Whether two equations differ only by a number with which both sides are multiplied."""
    if not all(isinstance(side, sympy.Expr) for one in (gold, answer) for side in one.args):
        return False
    left = [sympy.expand(one.lhs - one.rhs) for one in (gold, answer)]
    if left[0] in (left[1], -left[1]):
        return True
    terms = [one.as_coefficients_dict() for one in left]
    if terms[0].keys() != terms[1].keys():
        return False
    ratios = {terms[0][term] / terms[1][term] for term in terms[0]}
    return len(ratios) == 1 and ratios.pop() not in {0, sympy.zoo, sympy.nan}


def _unnamed(expression: Any, other: Any) -> Any:
    """The right side of D = [2, 9), and of y = 3x − 2 beside f(x) = 3x − 2; else the expression."""
    if not isinstance(expression, sympy.Eq):
        return expression
    is_set = isinstance(expression.rhs, sympy.Interval | sympy.Union) and expression.lhs.is_Symbol
    is_function = isinstance(other, sympy.Eq) and isinstance(other.lhs, sympy.core.function.AppliedUndef)
    is_value_of_it = is_function and expression.lhs.is_Symbol and expression.lhs.name == "y"
    return expression.rhs if is_set or is_value_of_it else expression


def _is_system(expression: Any) -> bool:
    """Whether an expression gives each of several names a value: x = 3, y = 5."""
    parts = expression.args if isinstance(expression, sympy.FiniteSet) else ()
    names = {part.lhs for part in parts if isinstance(part, sympy.Eq) and part.lhs.is_Symbol}
    return len(parts) == len(names) > 1


def _named_values(expression: Any, other: Any) -> Any:
    """An expression in the form of another one; unchanged if it is in no other.

    (x, y) = (1, 2) beside x = 1, y = 2 is a system; x₁ = 1, x₂ = 2 beside a list of values is the list 1, 2.
    """
    if _is_system(other) and isinstance(expression, sympy.Eq):
        names, values = _point(expression.lhs) or [], _point(expression.rhs) or []
        if len(names) == len(values) and all(isinstance(name, sympy.Symbol) for name in names):
            pairs = zip(names, values, strict=True)
            return sympy.FiniteSet(*(sympy.Eq(name, value, evaluate=False) for name, value in pairs))
    if _is_system(expression) and _is_list(other) and not _is_relation(other):
        letters = {_INDEX.sub("", part.lhs.name) for part in expression.args}
        is_indexed = all(_INDEX.search(part.lhs.name) for part in expression.args)
        if is_indexed and len(letters) == 1:
            return sympy.FiniteSet(*(part.rhs for part in expression.args))
    return expression


def in_order(text: str) -> list[Any] | None:
    """The values of a text that lists two or more without brackets, in their order; else None."""
    parts = text.split(",")
    if len(parts) < 2 or re.search(r"[()\[\]{}=<>]", re.sub(r"\{(?:[^{}]|\{[^{}]*\})*\}", "", text)):
        return None
    values = [read(part) for part in parts]
    return values if all(map(is_closed_number, values)) else None


def _is_matrix(expression: Any) -> bool:
    return isinstance(expression, sympy.MatrixBase)


def _is_vector(expression: Any) -> bool:
    return _is_matrix(expression) and 1 in expression.shape


def _point(expression: Any) -> list[Any] | None:
    """The coordinates of a point: of (3, 5) or [3, 5], read as intervals, of x = 3, y = 5, or of a vector."""
    if isinstance(expression, sympy.MatrixBase):
        return list(expression)
    if _is_system(expression):
        return [arg.rhs for arg in sorted(expression.args, key=lambda arg: str(arg.lhs))]
    if isinstance(expression, sympy.Interval) and expression.left_open == expression.right_open:
        return [expression.start, expression.end]
    return list(expression) if isinstance(expression, sympy.Tuple) else None


def is_closed_number(expression: Any) -> bool:
    """Whether an expression is a number without symbols, not a set, a matrix or a relation."""
    return bool(getattr(expression, "is_number", False)) and isinstance(expression, sympy.Expr)


def value_of(expression: Any) -> Fraction | None:
    """The value of a real number, to 30 digits; None for any other expression."""
    value = sympy.N(expression, 30) if is_closed_number(expression) else None
    return Fraction(str(value)) if isinstance(value, sympy.Float | sympy.Integer) else None


def from_number(number: Number) -> Any:
    """Converts a number to math-verify's representation: decimals to floats, percent to a product."""
    value = sympy.Rational(number.value.numerator, number.value.denominator)
    if number.is_decimal:
        value = sympy.Float(value, 30)
    return latex2sympy2_extended.convert_to_pct(value) if number.is_percent else value


def scaled(value: Number | Any, ratio: Fraction) -> Any:
    """A value times a number; a value that is no number or formula unchanged."""
    expression = from_number(value) if isinstance(value, Number) else value
    is_term = isinstance(expression, sympy.Expr)
    return expression * sympy.Rational(ratio.numerator, ratio.denominator) if is_term else expression


def as_text(expression: Any) -> str:
    """Converts an expression to text that can be a ground truth, equal for equal numbers: "1/2" for 0.5."""
    if is_closed_number(expression):
        hundredth = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
        if expression.has(hundredth):
            expression = expression.as_independent(hundredth)[0]
        expression = sympy.nsimplify(expression.doit(), rational=expression.has(sympy.Float) or None)
        return str(expression) if expression.is_Rational else str(sympy.latex(expression))
    return str(sympy.latex(expression))


def _verify(gold: Any, answer: Any) -> bool:
    if all(is_closed_number(one) and not one.has(sympy.UnevaluatedExpr) for one in (gold, answer)):
        return _equal_numbers(gold.doit(), answer.doit())
    if _has_log_and_large_number(gold, answer):
        return bool(_expanded(gold) == _expanded(answer))
    is_name = [isinstance(one, sympy.Symbol) for one in (gold, answer)]
    if is_name[0] != is_name[1] and all(isinstance(one, sympy.Expr) for one in (gold, answer)):
        return bool(sympy.simplify(gold - answer) == 0)  # math-verify compares a symbol as text
    return bool(grader.verify(gold, answer, timeout_seconds=None)) or _agree_on_reals(gold, answer)


def _agree_on_reals(gold: Any, answer: Any) -> bool:
    """Whether two formulas with roots have the same real values: √(1/n) and 1/√n.

    sympy does not simplify them to the same, because it considers all complex n. Where one has
    no real value, the other has none.
    """
    formulas = (gold, answer)
    if not all(isinstance(formula, sympy.Expr) for formula in formulas) or not all(
        formula.has(sympy.Pow) for formula in formulas
    ):
        return False
    names = sorted(gold.free_symbols, key=str)
    if not names or gold.free_symbols != answer.free_symbols or len(names) > 3 or not _has_root(gold):
        return False
    num_real = 0
    for point in _POINTS:
        values = [formula.subs(dict(zip(names, point, strict=False))).evalf(30) for formula in formulas]
        is_real = [value.is_real and value.is_finite for value in values]
        if is_real[0] != is_real[1] or (is_real[0] and not _equal_numbers(*values)):
            return False
        num_real += bool(is_real[0])
    return num_real >= _MIN_REAL_POINTS


def _has_root(formula: Any) -> bool:
    return any(power.exp.is_Rational and not power.exp.is_Integer for power in formula.atoms(sympy.Pow))


def _equal_numbers(gold: Any, answer: Any) -> bool:
    """Whether two numbers are equal; decimals may differ by 5e-7, but not by more than 1e-4 of the value."""
    if (gold.is_Rational and answer.is_Rational) or gold.is_infinite or answer.is_infinite:
        return bool(gold == answer)
    is_decimal = gold.has(sympy.Float) or answer.has(sympy.Float)
    values = [one.evalf(PRECISION) for one in (gold, answer)]
    gap = abs(values[0] - values[1])
    size = max(map(abs, values))
    if is_decimal:
        return bool(gap <= min(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * size))
    return bool(gap * 10 ** (PRECISION // 2) <= size and (size > 1e-9 or sympy.simplify(gold - answer) == 0))


def _has_log_and_large_number(*expressions: Any) -> bool:
    """Whether simplification may write n · log(b) as log(bⁿ) with an integer bⁿ of millions of digits."""
    found = [one.doit() for one in expressions if isinstance(one, sympy.Basic)]
    if not any(one.has(sympy.log) for one in found):
        return False
    return any(
        _LARGEST_FACTOR < abs(number) < sympy.oo for one in found for number in one.atoms(sympy.Number)
    )


def _expanded(expression: Any) -> Any:
    expression = expression.doit()
    return sympy.expand(expression) if isinstance(expression, sympy.Expr) else expression


def _is_relation(expression: Any) -> bool:
    if isinstance(expression, sympy.FiniteSet):
        return any(map(_is_relation, expression.args))
    return bool(grader.is_relation(expression))


def _equations(answer: Any) -> list[Any]:
    """Left sides of an answer's equations; the first side of a chain such as "20 + 6 = 26 = …"."""
    if isinstance(answer, sympy.FiniteSet):
        return [left for arg in answer.args for left in _equations(arg)]
    if isinstance(answer, sympy.Eq):
        return [answer.lhs]
    return [answer._unsorted_args[0].lhs] if grader.is_equation(answer) else []


def _names(left: Any) -> bool:
    """Whether an equation's left side only names a quantity: no number is a term or factor, except −1."""
    if left.is_number and isinstance(left, sympy.Expr):
        return False
    if isinstance(left, sympy.Add | sympy.Mul):
        return all(_names(arg) or arg == -1 for arg in left.args)
    return True


def _has_value(gold: Any, answer: Any) -> bool:
    """Whether a relation may equal an answer that is not a relation.

    An equation may if its left side is a single name; several equations, if all have the same one. Another
    relation may if neither it nor the answer is a list: 1 < x < 2 equals an interval.
    """
    parts = gold.args if isinstance(gold, sympy.FiniteSet) else [gold]
    if not all(isinstance(part, sympy.Eq) for part in parts):
        return not isinstance(gold, sympy.FiniteSet) and not isinstance(answer, sympy.FiniteSet)
    names = {part.lhs for part in parts}
    name = names.pop()
    if isinstance(name, sympy.Pow):  # f^{-1}(x)
        name = name.base if name.base.is_Function else None
    is_segment = isinstance(name, sympy.Mul) and all(str(part)[:1].isupper() for part in name.args)  # AB
    one = sympy.Symbol | sympy.Tuple | sympy.Derivative | sympy.core.function.AppliedUndef
    return not names and (is_segment or isinstance(name, one))


def _is_pair(expression: Any) -> bool:
    value = expression.rhs if isinstance(expression, sympy.Eq) else expression
    return isinstance(value, sympy.Interval | sympy.Tuple)


def _is_list(expression: Any) -> bool:
    """Whether an expression is a set or a list of values that are not pairs."""
    return isinstance(expression, sympy.FiniteSet) and not any(map(_is_pair, expression.args))
