"""Evaluates expressions of tables, Python files and shell scripts, without executing code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any


class NoCounterpart(ValueError):
    """A value without equivalent in a spec; the text says why, and what to write instead."""


class Open:
    """An unknown value: a formula can return it unchanged, but not compute with it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _refuse(self, *others: object) -> Any:
        raise TypeError("not known")

    __eq__ = __bool__ = __str__ = _refuse
    __hash__ = None  # type: ignore[assignment]


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "int": int,
    "float": float,
    "str": str,
    "len": len,
    "round": round,
    "ceil": math.ceil,
}


#: The most often that an expression may repeat a text or list.
_MAX_REPEATS = 10_000


def evaluate(
    text: str, names: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]] | None = None
) -> Any:
    """Evaluates an expression over `names`: literals, arithmetic, comparisons, `a if b else c`, `min` ….

    Args:
        functions: those that the expression may call besides `min`, `max` ….

    Raises:
        ValueError: it cannot be evaluated: unsupported syntax, an unknown name, a division by zero.
    """

    def called(node: ast.expr) -> Any:
        match node:
            case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in (functions or {}):
                return (functions or {})[name](*(value_of(argument, names, called) for argument in given))
        raise ValueError(f"cannot be evaluated: {ast.unparse(node)}")

    try:
        return value_of(ast.parse(text.strip(), mode="eval").body, names, called)
    except (SyntaxError, TypeError, ArithmeticError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"cannot be evaluated: {text}") from error


def value_of(node: ast.expr, names: Mapping[str, Any], other: Callable[[ast.expr], Any] | None = None) -> Any:
    """Evaluates a node of a syntax tree; `other` evaluates what is not supported here.

    Raises:
        ValueError: as for `evaluate`. Wrong operands raise Python's exceptions.
    """

    def value(node: ast.expr) -> Any:  # noqa: PLR0911, PLR0912
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in names:
                return names[node.id]
            case ast.BinOp() if type(node.op) in _OPERATORS:
                left = value(node.left)
                right = value(node.right)
                if isinstance(node.op, ast.Mult) and not _is_small(left, right):
                    raise ValueError("a sequence repeated too often")
                return _OPERATORS[type(node.op)](left, right)
            case ast.UnaryOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](value(node.operand))
            case ast.BoolOp():
                wanted = isinstance(node.op, ast.Or)
                last: Any = None
                for part in node.values:
                    last = value(part)
                    if bool(last) is wanted:
                        break
                return last
            case ast.Compare():
                sides = [value(side) for side in (node.left, *node.comparators)]
                pairs = zip(node.ops, sides, sides[1:], strict=False)
                return all(_OPERATORS[type(op)](a, b) for op, a, b in pairs)
            case ast.IfExp():
                return value(node.body if value(node.test) else node.orelse)
            case ast.List() | ast.Tuple():
                return [value(item) for item in node.elts]
            case ast.Dict() if None not in node.keys:
                keys = [value(key) for key in node.keys if key is not None]
                return dict(zip(keys, map(value, node.values), strict=True))
            case ast.Subscript():
                container = value(node.value)
                if type(container) not in (str, list, dict):  # names of models and functions are texts, too
                    raise ValueError("no items")
                return container[value(node.slice)]
            case ast.JoinedStr():
                return "".join(str(value(part)) for part in node.values)
            case ast.FormattedValue() if node.format_spec is None and node.conversion == -1:
                return value(node.value)
            case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS and not node.keywords:
                return _FUNCTIONS[name](*map(value, node.args))
        if other is not None:
            return other(node)
        raise ValueError(f"cannot be evaluated: {ast.unparse(node)}")

    return value(node)


def _is_small(left: Any, right: Any) -> bool:
    counts = [
        b for a, b in ((left, right), (right, left)) if isinstance(a, str | list) and isinstance(b, int)
    ]
    return all(count <= _MAX_REPEATS for count in counts)
