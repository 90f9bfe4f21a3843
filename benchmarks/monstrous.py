"""Measures the time saved by rejecting expressions that are too large to compute before they reach sympy.

    python benchmarks/monstrous.py [--responses 64] [--workers 2]

Grades a batch of such responses with `maths`, and with a variant that passes every expression to sympy and
relies on the time limit. Both use grading processes that have already graded one ordinary response. Prints
Markdown: wall seconds, seconds per response, the ratio, and the number of right responses (0 for both).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rlctl.reward.pool import DEADLINE_S, GradingPool
from rlctl.reward.protocol import Sample

MONSTROUS = [
    "9^{9^{9}}",
    "(10^{9})!",
    "\\binom{10^{7}}{5000000}",
    "((8!)!)!",
    "(x+1)^{5000}",
    "\\sum_{i=1}^{2000}\\sum_{j=1}^{2000}\\frac{1}{i+j}",
    "\\prod_{k=1}^{10000000}(k+1)",
    "\\sqrt{1+" * 40 + "7" + "}" * 40,
]
UNGUARDED = """
from rlctl.reward import expressions, maths
expressions.is_too_large = lambda text: False
def grade(response, ground_truth):
    return maths.grade(response, ground_truth)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    texts = [MONSTROUS[place % len(MONSTROUS)] for place in range(options.responses)]
    samples = [Sample(f"\\boxed{{{text}}}", "7") for text in texts]
    with tempfile.TemporaryDirectory() as directory:
        unguarded = Path(directory) / "unguarded.py"
        unguarded.write_text(UNGUARDED, encoding="utf-8")
        after, right = measured("maths", samples, options.workers)
        before, right_before = measured(f"{unguarded}:grade", samples, options.workers)
    print("| | seconds | per response | ratio |")
    print("|---|---|---|---|")
    print(f"| time limit of {DEADLINE_S:g} s alone | {before:.1f} | {before / len(samples):.3f} s | 1 |")
    share = 1000 * after / len(samples)
    print(f"| refused before sympy | {after:.3f} | {share:.1f} ms | {before / after:,.0f} |")
    print(f"\nright: {right} with, {right_before} without")


def measured(grader: str, samples: list[Sample], num_workers: int) -> tuple[float, int]:
    """Wall seconds to grade a batch, and the number of right responses."""
    pool = GradingPool(grader, num_workers=num_workers)
    try:
        pool.grade([Sample("\\boxed{6}", "7")] * num_workers)
        start = time.perf_counter()
        grades = pool.grade(samples)
        seconds = time.perf_counter() - start
    finally:
        pool.close()
    return seconds, grades.count(1.0)


if __name__ == "__main__":
    main()
