r"""Compares `maths` with math-verify on pairs of a response and a ground truth whose score is known.

    python benchmarks/maths_pairs.py [--seed 0] [--numbers 6]

The pairs are the forms of `tests/unit/reward/maths_pairs.txt`, with numbers drawn anew for each
seed. Prints Markdown: for each grader the wrong responses that it scores 1, the right responses that
it scores 0, and the processor time of a pair.
math-verify reads the last box or number of a response, as its users call it.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import math_verify

from rlctl.reward import maths
from tests.unit.reward.maths_pairs import Pair, pairs


def peer(response: str, ground_truth: str) -> float:
    gold = math_verify.parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    answer = math_verify.parse(response, parsing_timeout=None)
    return float(math_verify.verify(gold, answer, timeout_seconds=None))


def row(name: str, grade: Callable[[str, str], float], asked: list[Pair]) -> str:
    false_ones = false_zeros = 0
    start = time.process_time()
    for pair in asked:
        score = grade(pair.response, pair.ground_truth)
        false_ones += score == 1.0 and pair.score == 0.0
        false_zeros += score != 1.0 and pair.score == 1.0
    milliseconds = 1000 * (time.process_time() - start) / len(asked)
    return f"| {name} | {false_ones} | {false_zeros} | {milliseconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--numbers", type=int, default=6)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    draw = random.Random(arguments.seed)
    numbers = [draw.randint(2, 10 ** draw.randint(1, 4)) for _ in range(arguments.numbers)]
    asked = [pair for number in numbers for pair in pairs(number)]
    maths.grade("\\boxed{x+1}", "1+x")  # imports sympy
    num_right = sum(pair.score == 1.0 for pair in asked)
    num_wrong = len(asked) - num_right
    print(f"| grader | scores 1, of {num_wrong} wrong | scores 0, of {num_right} right | CPU ms a pair |")
    print("|---|---|---|---|")
    print(row("maths", maths.grade, asked))
    print(row("math-verify", peer, asked))


if __name__ == "__main__":
    main()
