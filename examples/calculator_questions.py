"""Writes products and sums of numbers of two digits, for `rlctl train -p smollm2-135m-calculator`.

    python examples/calculator_questions.py data/calculator

writes `train.parquet` and `held_out.parquet`. A model as small as SmolLM2-135M does not call a tool that it
has only read about. Each prompt therefore shows two calls, which it copies in about half of its replies.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from rlctl.data.schema import Message, Row, write_rows

SHOWN = (("13 * 7", 91), ("58 + 64", 122))
SIZES = {"train": 512, "held_out": 64}


def rows() -> list[Row]:
    """One row for each of the chosen expressions, without a repetition."""
    pairs = list(itertools.product(range(11, 100), repeat=2))
    expressions = [(f"{a} * {b}", a * b) for a, b in pairs] + [(f"{a} + {b}", a + b) for a, b in pairs]
    shown: list[Message] = []
    for expression, value in SHOWN:
        arguments = f'{{"expression": "{expression}"}}'
        call = f'<tool_call>{{"name": "calculate", "arguments": {arguments}}}</tool_call>'
        shown += [Message("user", f"What is {expression}?"), Message("assistant", call)]
        shown += [Message("tool", str(value)), Message("assistant", str(value))]
    found = []
    chosen = random.Random(0).sample(expressions, sum(SIZES.values()))
    for index, (expression, value) in enumerate(chosen):
        question = f"What is {expression}?"
        prompt = (*shown, Message("user", question))
        found.append(Row("calculator", prompt, str(value), ability="maths", index=index, question=question))
    return found


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "data/calculator")
    out.mkdir(parents=True, exist_ok=True)
    found = rows()
    for name, count in SIZES.items():
        write_rows(out / f"{name}.parquet", name, found[:count])
        print(f"{out / name}.parquet: {count} prompts")
        found = found[count:]
