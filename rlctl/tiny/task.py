"""The embedded task: two-digit addition, the sum's digits least significant first.

`12+34=` asks for `640`: 46, reversed, padded with zeros to three digits. Least significant first
makes each digit depend on what is already written, which a model of two layers can learn.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlctl.data.schema import Message, Row
from rlctl.data.write import write_rows

DATA_SOURCE = "embedded/addition"
#: For whoever reads a response of the task.
WRITTEN = "The built-in task writes sums lowest digit first, padded to three digits: 71+63= → 431 means 134."

Problem = tuple[str, str]  # prompt, right answer


def problem(a: int, b: int) -> Problem:
    """Prompt and answer of a + b, both of two digits: `problem(12, 34) == ("12+34=", "640")`."""
    return f"{a:02d}+{b:02d}=", f"{a + b:03d}"[::-1]


def split(num_val: int) -> tuple[list[Problem], list[Problem]]:
    """All 8,100 problems as (training, validation), disjoint, in an order that looks random.

    The order is that of the prompts' SHA-256, so it is the same with every library and seed.
    """
    everything = [problem(a, b) for a in range(10, 100) for b in range(10, 100)]
    everything.sort(key=lambda item: hashlib.sha256(item[0].encode()).digest())
    return everything[num_val:], everything[:num_val]


def write_parquet(problems: list[Problem], split_name: str, path: Path) -> None:
    """Write one split in verl's row schema."""
    rows = [
        Row(DATA_SOURCE, (Message("user", prompt),), answer, ability="maths", index=index)
        for index, (prompt, answer) in enumerate(problems)
    ]
    write_rows(path, split_name, rows)
