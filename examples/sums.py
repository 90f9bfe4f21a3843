"""Writes prompts for a small language model: questions about sums of two numbers, at most 20.

    python examples/sums.py data/sums

writes `train.parquet`, and `held_out.parquet` with sums that do not occur in training in either order.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from rlctl.data.schema import Message, Row, write_rows

HIGHEST = 20
#: Held-out pairs among the 100 unordered pairs.
NUM_HELD_OUT = 20


def rows(pairs: list[tuple[int, int]]) -> list[Row]:
    """One row per pair, in verl's row schema; `maths` grades the answers."""
    asked = [(f"What is {a} + {b}? Reply with the number only.", str(a + b)) for a, b in pairs]
    return [
        Row("sums", (Message("user", question),), answer, ability="maths", index=index, question=question)
        for index, (question, answer) in enumerate(asked)
    ]


def split() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Splits all ordered pairs into (training, held out); both orders of a pair are in the same split."""
    unordered = [(a, b) for a in range(1, HIGHEST) for b in range(a, HIGHEST) if a + b <= HIGHEST]
    unordered.sort(key=lambda pair: hashlib.sha256(str(pair).encode()).digest())
    held_out = set(unordered[:NUM_HELD_OUT])
    both = [(a, b) for a in range(1, HIGHEST) for b in range(1, HIGHEST) if a + b <= HIGHEST]
    return (
        [pair for pair in both if tuple(sorted(pair)) not in held_out],
        [pair for pair in both if tuple(sorted(pair)) in held_out],
    )


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "data/sums")
    out.mkdir(parents=True, exist_ok=True)
    for name, pairs in zip(("train", "held_out"), split(), strict=True):
        write_rows(out / f"{name}.parquet", name, rows(pairs))
        print(f"{out / name}.parquet: {len(pairs)} prompts")
