"""Countdown: an equation that makes a target from given numbers, each used once."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rlctl.reward.answer import Place, places
from rlctl.reward.numbers import plain

#: Characters of an equation; longer ones are not looked at.
MAX_CHARS = 1000
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "[": "(", "]": ")", "{": "(", "}": ")"})
_OPERATION = re.compile(r"[\d)]\s*[-+*/]")
_EXPRESSION = re.compile(r"[\d+\-*/(). ]*\d[\d+\-*/(). ]*")


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked."""

    numbers: tuple[Fraction, ...]  # in ascending order
    target: Fraction


def grade(response: str, ground_truth: str) -> float:
    """1.0 when the response's equation uses each number once and makes the target, else 0.0.

    Args:
        response: of a model; its equation may go on with "= 24".
        ground_truth: JSON, `{"numbers": [2, 3, 4], "target": 24}`.

    Raises:
        ValueError: the ground truth is something else.
    """
    task = parse_task(ground_truth)
    for place in places(response):
        expression = _expression(place)
        if expression is None:
            continue
        try:
            tree = ast.parse(expression, mode="eval").body
            numbers: list[Fraction] = []
            value = _value(tree, numbers)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return 0.0
        return float(tuple(sorted(numbers)) == task.numbers and value == task.target)
    return 0.0


def answer_of(response: str) -> str | None:
    """The response's equation without white space; None when it has none."""
    found = filter(None, map(_expression, places(response)))
    return next((expression.replace(" ", "") for expression in found), None)


@lru_cache(maxsize=1024)  # the siblings of a prompt share one ground truth
def parse_task(ground_truth: str) -> Task:
    """The task a ground truth describes.

    Raises:
        ValueError: it is not `{"numbers": […], "target": …}` in JSON.
    """
    values = json.loads(ground_truth, parse_float=Fraction)
    try:
        return Task(tuple(sorted(map(Fraction, values["numbers"]))), Fraction(values["target"]))
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f'the ground truth is not {{"numbers": […], "target": …}}: {error!r}') from None


def _expression(place: Place) -> str | None:
    """The arithmetic of a piece of text: of its sides around equals signs the first that has an operator."""
    shown = plain(place.text).translate(_SIGNS)[:MAX_CHARS]
    sides = [text.strip(" .") for side in shown.split("=") for text in _EXPRESSION.findall(side)]
    return next((side for side in sides if _OPERATION.search(side)), sides[0] if sides else None)


def _value(node: ast.expr, numbers: list[Fraction]) -> Fraction:
    """The value of plain arithmetic; its numbers are appended to `numbers`."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            numbers.append(Fraction(str(value)))
            return numbers[-1]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, numbers), _value(right, numbers))
    raise ValueError(f"not plain arithmetic: {ast.dump(node)[:80]}")
