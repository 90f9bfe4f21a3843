import numpy as np
import pytest

from rlctl.evaluate.scores import summarise


def test_figures_of_one_source(make_samples):
    samples = make_samples("a", [[1, 0, 0, 0]]) + make_samples("a", [[1, 1, 1, 1]], first=1, truncated=True)
    [score] = summarise(samples, [1, 4], 4)
    assert score.figures["avg"].value == pytest.approx(0.625)
    assert score.figures["pass@1"].value == pytest.approx(0.625)
    assert score.figures["pass@4"].value == 1.0
    assert (score.num_questions, score.num_samples, score.num_short) == (2, 8, 0)
    assert score.truncated_fraction.value == 0.5
    assert score.mean_length.value == 2.0
    assert score.figures["maj@4"] is None  # nobody read any answers


def test_grader_failures_are_left_out_not_scored_zero(make_samples):
    samples = make_samples("a", [[1.0, 1.0, None, None], [None] * 4], [["1", "1", None, None], [None] * 4])
    [score] = summarise(samples, [1, 4], 4)
    assert score.num_grader_errors == 6
    assert score.grader_error_fraction.value == 0.75
    assert score.num_short == 2
    assert score.figures["avg"].value == 1.0
    assert score.figures["avg"].num_questions == 1
    assert score.figures["maj@4"].value == 1.0
    assert score.figures["pass@4"] is None  # no question has four graded samples


def test_majority_by_question_and_only_where_answers_are_read(make_samples):
    voted = make_samples("a", [[1, 1, 0], [0, 0, 1]], [["7", "7", "8"], ["8", "8", "7"]])
    silent = make_samples("b", [[1, 1, 1]], first=2)
    a, b, overall = summarise(voted + silent, [1], 3)
    assert (a.figures["maj@3"].value, a.figures["maj@3"].num_questions) == (0.5, 2)
    assert b.figures["maj@3"] is None
    assert overall.figures["maj@3"].num_questions == 2


def test_sources_by_name_and_then_all_together(make_samples):
    samples = make_samples("b", [[1] * 4]) + make_samples("a", [[0] * 4], first=1)
    scores = summarise(samples + make_samples("b", [[0] * 4], first=2), [1], 4)
    assert [score.data_source for score in scores] == ["a", "b", "overall"]
    assert scores[-1].figures["avg"].value == pytest.approx(1 / 3)
    assert scores[-1].num_questions == 3


def test_partial_reward_is_not_a_pass(make_samples):
    [score] = summarise(make_samples("a", [[0.5, 0.9, 0.5, 0.9]]), [4], 4)
    assert score.figures["pass@4"].value == 0.0


def test_too_many_grader_failures_leave_no_score(make_samples):
    """One limit is met, the other is not."""
    rewards = [[1.0, 0.0, None, None], [0.0, 0.0, None, 1.0]]
    answers = [["1", "2", None, None], ["2", "3", None, "1"]]
    [score] = summarise(make_samples("a", rewards, answers), [1, 4], 4, 0.37)
    assert score.figures == dict.fromkeys(("avg", "pass@1", "pass@4", "maj@4"))
    assert score.is_withheld
    [within] = summarise(make_samples("a", rewards, answers), [1, 4], 4, 0.38)
    assert not within.is_withheld
    assert within.figures["avg"].value == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_each_source_has_its_own_limit(make_samples):
    samples = make_samples("bad", [[None], [1.0]]) + make_samples("good", [[1.0]] * 18, first=2)
    bad, good, overall = summarise(samples, [1], 1, 0.1)
    assert bad.figures == {"avg": None, "pass@1": None}
    assert good.figures["avg"].value == overall.figures["avg"].value == 1.0


def test_intervals_of_easy_questions_cover_pass_at_k(make_samples):
    """Nearly every question has pass@8 = 1: the spread of the others must not count as the whole variance."""
    rng = np.random.default_rng(0)
    truth = 1.0 - np.prod([(1.0 + i) / (5.0 + i) for i in range(8)])  # 1 − E[(1 − p)⁸], p ~ Beta(4, 1)
    hits, repeats = 0, 150
    for _ in range(repeats):
        rewards = rng.random((20, 16)) < rng.beta(4.0, 1.0, (20, 1))
        [score] = summarise(make_samples("a", rewards.astype(float).tolist()), [8], 16)
        found = score.figures["pass@8"]
        hits += found.low <= truth <= found.high
    assert hits / repeats >= 0.9
