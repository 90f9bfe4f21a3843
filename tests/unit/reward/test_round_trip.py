"""Ground truths that their grader cannot read are found before anything is trained on them."""

import pytest

from rlctl.reward import maths
from rlctl.reward.round_trip import check_ground_truths

GOOD = [
    ("openai/gsm8k", "72"),
    ("openai/gsm8k", "-1.5"),
    ("openai/gsm8k", "$1,234.00"),
    ("lighteval/MATH", "\\frac{1}{2}"),
    ("lighteval/MATH", "x^2 + 1"),
    ("lighteval/MATH", "[0, 1)"),
    ("lighteval/MATH", "\\text{Tuesday}"),
    ("embedded/addition", "any text"),
    ("cais/mmlu", "B. the text"),
    ("codecontests", "assert f(1) == 2"),
    ("countdown", '{"numbers": [1, 2], "target": 3}'),
]
BAD = [
    ("openai/gsm8k", "€", "not a mathematical expression"),
    ("cais/mmlu", "zebra", "begins with no letter"),
    ("codecontests", "print(1)", "no assert"),
    ("countdown", "24", "the ground truth is not"),
]


def test_each_gets_its_reason_or_none():
    pairs = [*GOOD, *[(source, truth) for source, truth, _ in BAD], *GOOD[:2]]
    reasons = check_ground_truths(pairs)
    assert reasons[: len(GOOD)] == [""] * len(GOOD)
    for (_, _, wanted), reason in zip(BAD, reasons[len(GOOD) :], strict=False):
        assert wanted in reason
        assert "\n" not in reason
    assert reasons[-2:] == ["", ""]
    assert check_ground_truths(pairs) == reasons


@pytest.mark.parametrize(
    "number", ["0", "-7", "000", "-0", "12.5", "1.000000", "123456789012345.123456", "-0.000001"]
)
def test_plain_numbers_need_no_grading(number):
    """The short cut of the round trip holds: the grader would say the same."""
    assert maths.grade(number, number) == 1.0
    assert maths.grade("", number) == 0.0
