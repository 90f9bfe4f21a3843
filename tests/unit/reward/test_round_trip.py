"""Ground truths that their grader cannot read are found before anything is trained on them."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.reward import maths, round_trip
from rlctl.reward.round_trip import check_ground_truths, right_answer, wrong_answer

GOOD = [
    ("openai/gsm8k", "72"),
    ("openai/gsm8k", "-1.5"),
    ("openai/gsm8k", "$1,234.00"),
    ("lighteval/MATH", "\\frac{1}{2}"),
    ("lighteval/MATH", "x^2 + 1"),
    ("lighteval/MATH", "[0, 1)"),
    ("lighteval/MATH", "\\text{Tuesday}"),
    ("lighteval/MATH", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ("lighteval/MATH", "864 \\mbox{ inches}^2"),
    ("lighteval/MATH", "\\text{June 20}"),
    ("lighteval/MATH", "50\\%"),
    ("embedded/addition", "any text"),
    ("cais/mmlu", "B. the text"),
    ("codecontests", "assert f(1) == 2"),
    ("countdown", '{"numbers": [1, 2], "target": 3}'),
]
BAD = [
    ("openai/gsm8k", "€", "not a mathematical expression"),
    ("cais/mmlu", "zebra", "does not begin with the letter"),
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


PLAIN = st.from_regex(r"-?[0-9]{1,15}(\.[0-9]{1,6})?", fullmatch=True)


@settings(max_examples=150, deadline=None)
@given(PLAIN)
def test_plain_numbers_need_no_grading(number):
    """The short cut of the round trip holds: the grader would say the same."""
    assert maths.grade(right_answer("maths", number), number) == 1.0
    assert maths.grade(wrong_answer("maths", number), number) == 0.0
    assert maths.grade("", number) == 0.0


@pytest.mark.parametrize(
    ("grader", "truth", "right", "wrong"),
    [
        ("maths", "72", "\\boxed{72}", "\\boxed{73}"),
        ("maths", "Worked out: 3\n#### 0.5", "\\boxed{0.5}", "\\boxed{1.5}"),
        ("maths", "x_1 = 9", "\\boxed{x_1 = 9}", "\\boxed{x_1 = 10}"),
        ("maths", "x_{12}", "\\boxed{x_{12}}", "\\boxed{x_{13}}"),
        ("maths", "\\text{even}", "\\boxed{\\text{even}}", None),
        ("exact", "007", "007", "008"),
        ("multiple_choice", "B. 26", "B. 26", None),
        ("code", "assert f(1) == 2", None, None),
        ("countdown", "{}", None, None),
    ],
)
def test_the_right_and_the_wrong_answer(grader, truth, right, wrong):
    assert right_answer(grader, truth) == right
    assert wrong_answer(grader, truth) == wrong


def test_a_grader_that_credits_another_number_is_found(monkeypatch):
    """As if the grader took the last number of everything: each pair is named with what it was given."""
    pairs = [("lighteval/MATH", "[3,4]"), ("lighteval/MATH", "x=4"), ("lighteval/MATH", "(4,x)")]
    pool = SimpleNamespace(grade=lambda samples: [float("4" in sample.response) for sample in samples])
    monkeypatch.setattr(round_trip, "_pool", lambda grader, pid: pool)
    monkeypatch.setattr(round_trip, "_known", {})
    reasons = check_ground_truths(pairs)
    assert reasons[0] == "the grader gives '\\\\boxed{[4,4]}' 1, not 0"
    assert reasons[1] == ""
    assert reasons[2] == ""
