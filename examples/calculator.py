"""A calculator as a tool, for `rlctl train -p smollm2-135m-calculator`: a class as TRL's trainers take it."""

from __future__ import annotations

import ast
import operator

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator:
    """Answers sums, differences and products."""

    def reset(self, **row: object) -> None:
        """Nothing to prepare: the prompt says it all."""

    def calculate(self, expression: str) -> str:
        """Computes an expression.

        Args:
            expression: Numbers with +, - and *, such as 12 + 30.
        """
        return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 10**9:
        return node.value
    raise ValueError("only whole numbers with +, - and *")
