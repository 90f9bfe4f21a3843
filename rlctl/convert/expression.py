"""Evaluates arithmetic and conditions in tables, Python files and shell scripts without executing code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
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
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
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
    "only": lambda values, allowed: [
        value for value in (values if isinstance(values, list) else [values]) if value in allowed
    ],
    "is_parquet": lambda name: str(name).endswith(".parquet"),
}
_LARGEST = 10_000


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """Evaluates an expression over `names`: literals, arithmetic, comparisons, `a if b else c`, `min` ….

    Raises:
        ValueError: it cannot be evaluated: unsupported syntax, an unknown name, a division by zero.
    """
    try:
        return value_of(ast.parse(text.strip(), mode="eval").body, names)
    except (SyntaxError, TypeError, ArithmeticError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"cannot be evaluated: {text}") from error


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:  # noqa: PLR0911, PLR0912
    """Evaluates a node of a syntax tree.

    Raises:
        ValueError: as for `evaluate`. Wrong operands raise Python's exceptions.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.BinOp() if type(node.op) in _BINARY:
            left, right = value_of(node.left, names), value_of(node.right, names)
            if isinstance(node.op, ast.Mult) and not _is_small(left, right):
                raise ValueError("a sequence repeated too often")
            return _BINARY[type(node.op)](left, right)
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](value_of(node.operand, names))
        case ast.BoolOp():
            wanted = isinstance(node.op, ast.Or)
            value: Any = None
            for part in node.values:
                value = value_of(part, names)
                if bool(value) is wanted:
                    break
            return value
        case ast.Compare():
            sides = [value_of(side, names) for side in (node.left, *node.comparators)]
            pairs = zip(node.ops, sides, sides[1:], strict=False)
            return all(_COMPARE[type(op)](a, b) for op, a, b in pairs)
        case ast.IfExp():
            return value_of(node.body if value_of(node.test, names) else node.orelse, names)
        case ast.List() | ast.Tuple():
            return [value_of(item, names) for item in node.elts]
        case ast.Dict() if None not in node.keys:
            keys = [value_of(key, names) for key in node.keys if key is not None]
            return dict(zip(keys, [value_of(value, names) for value in node.values], strict=True))
        case ast.Subscript():
            return value_of(node.value, names)[value_of(node.slice, names)]
        case ast.JoinedStr():
            return "".join(str(value_of(part, names)) for part in node.values)
        case ast.FormattedValue() if node.format_spec is None and node.conversion == -1:
            return value_of(node.value, names)
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS and not node.keywords:
            return _FUNCTIONS[name](*[value_of(argument, names) for argument in node.args])
    raise ValueError(f"cannot be evaluated: {ast.unparse(node)}")


def _is_small(left: Any, right: Any) -> bool:
    counts = [
        b for a, b in ((left, right), (right, left)) if isinstance(a, str | list) and isinstance(b, int)
    ]
    return all(count <= _LARGEST for count in counts)
