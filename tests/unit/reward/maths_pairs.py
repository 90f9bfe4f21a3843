"""Responses with known scores: the forms of maths_pairs.txt with numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FORMS = Path(__file__).with_name("maths_pairs.txt")


@dataclass(frozen=True)
class Pair:
    kind: str
    response: str
    ground_truth: str
    score: float


def pairs(number: int) -> Iterator[Pair]:
    """Every form, with ‹N› = `number` and ‹M› = `number` + 5, and the pairs without numbers.

    A section is `[kind: ground truth]`; its lines are responses, wrong ones after `✗ `.
    """
    kind = ground_truth = ""
    for line in FORMS.read_text(encoding="utf-8").splitlines():
        if line.startswith("[") and line.endswith("]") and ": " in line:
            kind, _, ground_truth = written(line[1:-1], number).partition(": ")
        elif line and not line.startswith("# "):
            is_wrong = line.startswith("✗ ")
            response = written(line.removeprefix("✗ ").replace("⏎", "\n"), number)
            yield Pair(kind, response, ground_truth, 0.0 if is_wrong else 1.0)


def written(form: str, number: int) -> str:
    return form.replace("‹N›", str(number)).replace("‹M›", str(number + 5))
