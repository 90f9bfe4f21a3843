"""What counts as a right answer."""

import pytest

from rlctl.reward import exact, maths
from rlctl.reward.graders import GRADERS, grader_for
from rlctl.spec.reward import GRADER_NAMES

RIGHT = [
    ("#### 72", "72"),
    ("She sold 48 + 24 = 72 clips.\n#### 72\n", "72"),
    ("72.0", "72"),
    ("#### 72.00", "72"),
    ("#### $1,234.00", "1234"),
    ("#### 1,000", "1000"),
    ("#### \\$18", "18"),
    ("#### 72 dollars.", "72"),
    ("#### **72**", "72"),
    ("#### -3", "-3"),
    ("#### 50%", "50"),
    ("#### 50%", "0.5"),
    ("#### 3/4", "0.75"),
    ("#### \\frac{3}{4}", "3/4"),
    ("#### x = 5", "5"),
    ("#### 0", "0"),
    ("####\n72", "72"),
    ("so \\boxed{72}", "72"),
    ("\\boxed{\\frac12}", "0.5"),
    ("#### Step 1\n5 apples\n#### Step 2\nthus \\boxed{72}", "72"),  # Markdown headings
    ("\\boxed{5} is wrong\n#### 72", "72"),
    ("#### 72\nNext question: what is 5 + 6?", "72"),
    ("The answer is 72.", "72"),
    ("x" * 10_000 + " #### 72 " + "\n" + "y" * 10_000, "72"),
    ("\\frac{1}{2}", "\\frac{1}{2}"),
    ("#### 72", "Worked solution\n#### 72"),
]
WRONG = [
    ("", "72"),
    (" \n", "72"),
    ("I do not know", "72"),
    ("####", "72"),
    ("#### 71", "72"),
    ("#### 3", "-3"),
    ("#### 2\\sqrt{3}", "2"),
    ("72 is what I thought first\n#### 71", "72"),
    ("#### 72\n#### 71", "72"),
    ("$1/0$", "1"),
    ("#### 7.2", "72"),
]


@pytest.mark.parametrize(("response", "ground_truth"), RIGHT)
def test_maths_right(response, ground_truth):
    assert maths.grade(response, ground_truth) == 1.0


@pytest.mark.parametrize(("response", "ground_truth"), WRONG)
def test_maths_wrong(response, ground_truth):
    assert maths.grade(response, ground_truth) == 0.0


def test_a_ground_truth_that_is_no_mathematics_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="ground truth '€' is not"):
        maths.grade("#### 1", "€")


def test_exact_looks_past_white_space_only():
    assert exact.grade(" 640\n", "640") == 1.0
    assert exact.grade("640.", "640") == 0.0
    assert exact.grade("", "640") == 0.0


def test_graders_are_those_the_spec_names():
    assert {*GRADERS, "auto", "code", "model"} == set(GRADER_NAMES)


def test_auto_goes_by_source():
    assert grader_for("embedded/addition") == "exact"
    assert grader_for("openai/gsm8k") == "maths"
