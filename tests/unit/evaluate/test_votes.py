from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.evaluate.scores import majority_reward
from rlctl.reward import maths
from rlctl.reward.protocol import Sample
from rlctl.reward.votes import same_answers


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["7", "7", "8"], [1.0, 1.0, 0.0], 1.0),
        (["7", "8", "8"], [1.0, 0.0, 0.0], 0.0),
        (["7", "8"], [1.0, 0.0], 0.5),
        (["7", "8", "9", "9", "7"], [1.0, 0.0, 0.0, 0.0, 1.0], 0.5),
        ([None, None, "7"], [0.0, 0.0, 1.0], 0.0),  # no answer may win
        ([None, "7", "7"], [0.0, 1.0, 1.0], 1.0),
        (["7", "7"], [1.0, 0.0], 0.5),  # a grader that changes its mind
        (["7"], [1.0], 1.0),
    ],
)
def test_reward_of_the_most_frequent_answer(answers, rewards, expected):
    assert majority_reward(answers, rewards) == expected


@given(st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=12), st.randoms())
def test_agrees_with_counting_one_answer_at_a_time_in_any_order(answers, order):
    graded = [(answer, float(answer == "1")) for answer in answers]
    most = max(answers.count(answer) for answer in answers)
    winners = {answer for answer in answers if answers.count(answer) == most}
    expected = Fraction(int("1" in winners), len(winners))
    order.shuffle(graded)
    found = majority_reward([answer for answer, _ in graded], [reward for _, reward in graded])
    assert found == pytest.approx(float(expected))


def test_nobody_voted():
    with pytest.raises(ValueError, match="no response"):
        majority_reward([], [])


@pytest.mark.parametrize(
    ("responses", "groups"),
    [
        ([r"\boxed{\frac{1}{3}}", r"\boxed{0.333333}", r"\boxed{0.34}"], [0, 0, 2]),
        ([r"\boxed{A}", r"\boxed{A. 26}", r"\boxed{B}"], [0, 0, 2]),
        ([r"\boxed{x=5}", r"\boxed{5}", r"\boxed{y=5}"], [0, 0, 2]),
        ([r"\boxed{y=2x+3}", r"\boxed{2x+3}", r"\boxed{y=2x+4}"], [0, 0, 2]),
        ([r"\boxed{x>2}", r"\boxed{(2,\infty)}", r"\boxed{[2,\infty)}"], [0, 0, 2]),
        ([r"\boxed{(1,2)}", r"\boxed{\langle 1,2\rangle}", r"\boxed{(2,1)}"], [0, 0, 2]),
        (["It takes 90 minutes.", "It takes 1.5 hours.", "It takes 90 hours."], [0, 0, 2]),
        (["The answer is 1.5 hours.", "1 hour 30 minutes", "The answer is 1.5 days."], [0, 0, 2]),
        ([r"\boxed{2\pi\text{ cm}}", r"\boxed{20\pi\text{ mm}}", r"\boxed{2\pi\text{ mm}}"], [0, 0, 2]),
        (["$1.50", "150 cents", "€1.50"], [0, 0, 2]),
        ([r"\boxed{y=2x+1}", r"\boxed{y-2x=1}", r"\boxed{y=2x-1}"], [0, 0, 2]),
        (["2 liters", "2000 cm^3", "2 cm^3"], [0, 0, 2]),
        ([r"\boxed{-125, 343}", r"\boxed{(-125,343)}", r"\boxed{-125}"], [0, 0, 2]),
    ],
)
def test_answers_that_the_grader_holds_equal_are_one(responses, groups):
    def grade(samples):
        return [maths.grade(sample.response, sample.ground_truth) for sample in samples]

    samples = [Sample(response, "7") for response in responses]
    joined = same_answers(samples, list(map(maths.answer_of, responses)), grade)
    assert [joined.index(answer) for answer in joined] == groups
