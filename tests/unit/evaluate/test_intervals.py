import numpy as np
import pytest
from scipy.stats import binomtest

from rlctl.evaluate.intervals import estimate, paired


@pytest.mark.parametrize(
    ("questions", "samples", "alpha", "beta"),
    [(20, 8, 9.0, 1.0), (20, 1, 1.0, 1.0), (50, 8, 0.9, 0.1), (200, 4, 0.2, 0.2), (20, 8, 20.0, 1.0)],
)
def test_covers_the_truth_about_as_often_as_it_says(questions, samples, alpha, beta):
    rng = np.random.default_rng(0)
    truth, hits, repeats = alpha / (alpha + beta), 0, 1000
    for _ in range(repeats):
        solved = rng.binomial(samples, rng.beta(alpha, beta, questions)) / samples
        found = estimate(solved.tolist())
        hits += found.low <= truth <= found.high
    assert 0.925 <= hits / repeats <= 0.985


@pytest.mark.parametrize("hard", [0.01, 0.03, 0.1])
@pytest.mark.parametrize(("questions", "samples"), [(20, 8), (30, 64), (50, 64), (200, 64)])
@pytest.mark.parametrize("other", [0.98, 0.02])
def test_covers_the_truth_if_a_few_questions_differ_from_all_others(questions, samples, hard, other):
    rng = np.random.default_rng(0)
    truth, hits, repeats = (1.0 - hard) * other + hard * (1.0 - round(other)), 0, 500
    for _ in range(repeats):
        chances = np.where(rng.random(questions) < hard, 1.0 - round(other), other)
        found = estimate((rng.binomial(samples, chances) / samples).tolist())
        hits += found.low <= truth <= found.high
    assert hits / repeats >= 0.93


def test_repeating_an_answer_adds_no_certainty_but_asking_more_questions_does():
    few = estimate([0.0, 1.0] * 10)
    more = estimate([0.0, 1.0] * 100)
    assert more.high - more.low < 0.4 * (few.high - few.low)


@pytest.mark.parametrize("right", [0, 3, 15, 29, 30])
def test_one_response_per_question_is_close_to_wilson(right):
    found = estimate([1.0] * right + [0.0] * (30 - right))
    wilson = binomtest(right, 30).proportion_ci(method="wilson")
    assert found.low == pytest.approx(wilson.low, abs=0.03)
    assert found.high == pytest.approx(wilson.high, abs=0.03)
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0


def test_all_right_is_not_certainty():
    found = estimate([1.0] * 20)
    assert found.high == 1.0
    assert 0.7 < found.low < 0.9


def test_rewards_of_unknown_range_get_students_interval():
    found = estimate([-1.0, 2.0, 5.0], bounds=None)
    assert found.value == 2.0
    assert found.high - 2.0 == pytest.approx(4.302653 * 3.0 / 3**0.5, rel=1e-6)
    assert estimate([3.0, 3.0], bounds=None).low is None
    assert estimate([0.0] * 20, bounds=None).low is None  # on which scale?
    assert estimate([1.0, 1.0], bounds=None).low is None  # one token each is no share of 100 %


@pytest.mark.parametrize("value", [0.1, 0.2, 0.7])
def test_rounding_is_no_spread(value):
    """The mean of equal values may differ from them in its last bit."""
    found = estimate([value] * 3)
    assert found.high - found.low > 0.5
    assert paired([0.4 - 0.2, 0.6 - 0.4]).low is None


def test_little_data():
    assert estimate([]) is None
    assert estimate([0.5]).low is None


def test_the_standard_error_is_clustered_by_question():
    """Against the cluster-robust formula written out over single responses."""
    rewards = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0], [1, 0, 0, 1]], dtype=float)
    residuals = rewards - rewards.mean()
    num_questions = len(rewards)
    clustered = np.sqrt((residuals.sum(1) ** 2).sum()) / rewards.size
    corrected = clustered * np.sqrt(num_questions / (num_questions - 1))
    assert estimate(rewards.mean(1)).stderr == pytest.approx(corrected)
    assert estimate(rewards.mean(1)).stderr > rewards.std(ddof=1) / np.sqrt(rewards.size)  # as if independent


def test_the_standard_error_is_zero_for_equal_values_and_unknown_for_one():
    assert estimate([1.0, 1.0, 1.0]).stderr == 0.0
    assert estimate([0.1 + 0.2, 0.3]).stderr == 0.0
    assert estimate([1.0]).stderr is None
    assert paired([0.5]).stderr is None
    assert paired([0.5, 0.0, 0.25]).stderr == pytest.approx(0.25 / np.sqrt(3))


@pytest.mark.parametrize("bounds", [(0.0, 10.0), (-1.0, 1.0), (0.0, 0.25)])
@pytest.mark.parametrize(("chance", "questions"), [(0.02, 20), (0.1, 20), (0.5, 20), (0.05, 100), (0.97, 50)])
def test_covers_the_truth_on_any_declared_scale(bounds, chance, questions):
    rng = np.random.default_rng(0)
    least, most = bounds
    hits, repeats = 0, 1000
    for _ in range(repeats):
        rewards = np.where(rng.random(questions) < chance, most, least)
        found = estimate(rewards.tolist(), bounds=bounds)
        assert least <= found.low <= found.value <= found.high <= most
        hits += found.low <= least + chance * (most - least) <= found.high
    assert hits / repeats >= 0.925


def test_a_scale_changes_an_interval_in_proportion():
    values = [0.0, 1.0, 0.25, 0.5, 0.0]
    share, scaled = estimate(values), estimate([5.0 + 10.0 * value for value in values], bounds=(5.0, 15.0))
    assert (scaled.low, scaled.high) == pytest.approx((5.0 + 10.0 * share.low, 5.0 + 10.0 * share.high))
    assert scaled.stderr == pytest.approx(10.0 * share.stderr)
