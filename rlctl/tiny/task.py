"""The embedded task: two-digit addition, with the digits of the sum least significant first.

The answer to `12+34=` is `640`: 46 padded with zeros to three digits and reversed. With the least significant
digit first, each carry comes from digits already written, which a two-layer model can learn.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlctl.data.schema import Message, Row, write_rows

DATA_SOURCE = "embedded/addition"
#: Note shown with responses of the task.
WRITTEN = "The built-in task writes sums lowest digit first, padded to three digits: 71+63= → 431 means 134."

Problem = tuple[str, str]  # prompt, right answer


def problem(a: int, b: int) -> Problem:
    """Prompt and answer of a + b for two-digit a and b: `problem(12, 34) == ("12+34=", "640")`."""
    return f"{a:02d}+{b:02d}=", f"{a + b:03d}"[::-1]


def split(num_val: int) -> tuple[list[Problem], list[Problem]]:
    """Splits all 8,100 problems into (training, validation), disjoint, in pseudo-random order.

    Problems are ordered by the SHA-256 of the prompt, independent of library versions and seed.
    """
    everything = [problem(a, b) for a in range(10, 100) for b in range(10, 100)]
    everything.sort(key=lambda item: hashlib.sha256(item[0].encode()).digest())
    return everything[num_val:], everything[:num_val]


def write_parquet(problems: list[Problem], split_name: str, path: Path) -> None:
    """Writes one split as Parquet in verl's row schema."""
    rows = [
        Row(DATA_SOURCE, (Message("user", prompt),), answer, ability="maths", index=index)
        for index, (prompt, answer) in enumerate(problems)
    ]
    write_rows(path, split_name, rows)
