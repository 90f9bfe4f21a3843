"""A calculator as a tool, and products and sums that need it, for `rlctl train -p smollm2-135m-calculator`.

    python examples/calculator.py data/calculator

writes `train.parquet` and `held_out.parquet`. The class is one as TRL's trainers take it. A model of this size has
not learned to call tools, so that each prompt shows two calls; it copies them now and then, and training does the rest.
"""

from __future__ import annotations

import ast
import operator
import random
import sys
from pathlib import Path

from rlctl.data.schema import Message, Row, write_rows

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SHOWN = (("13 * 7", 91), ("58 + 64", 122))
SIZES = {"train": 512, "held_out": 64}


class Calculator:
    """Answers sums, differences and products."""

    def reset(self) -> None:
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


def rows() -> list[Row]:
    """One row for each expression of two numbers of two digits, without a repetition."""
    numbers = range(11, 100)
    expressions = [
        (f"{a} {sign} {b}", str(_OPERATORS[kind](a, b)))
        for sign, kind in (("*", ast.Mult), ("+", ast.Add))
        for a in numbers
        for b in numbers
    ]
    shown: list[Message] = []
    for expression, value in SHOWN:
        call = (
            f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
        )
        shown += [Message("user", f"What is {expression}?"), Message("assistant", call)]
        shown += [Message("tool", str(value)), Message("assistant", str(value))]
    chosen = random.Random(0).sample(expressions, sum(SIZES.values()))
    return [
        Row(
            "calculator",
            (*shown, Message("user", question)),
            value,
            ability="maths",
            index=index,
            question=question,
        )
        for index, (expression, value) in enumerate(chosen)
        for question in [f"What is {expression}?"]
    ]


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "data/calculator")
    out.mkdir(parents=True, exist_ok=True)
    found = rows()
    for name, count in SIZES.items():
        write_rows(out / f"{name}.parquet", name, found[:count])
        print(f"{out / name}.parquet: {count} prompts")
        found = found[count:]
