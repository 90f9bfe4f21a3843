import pytest

from rlctl.evaluate.scores import summarise


def test_figures_of_one_source(make_samples):
    samples = make_samples("a", [[1, 0, 0, 0]]) + make_samples("a", [[1, 1, 1, 1]], first=1, truncated=True)
    [score] = summarise(samples, [1, 4], 4)
    assert score.avg.value == pytest.approx(0.625)
    assert score.pass_at[1].value == pytest.approx(0.625)
    assert score.pass_at[4].value == 1.0
    assert (score.num_questions, score.num_samples, score.num_short) == (2, 8, 0)
    assert score.truncated_fraction.value == 0.5
    assert score.mean_length.value == 2.0
    assert score.majority is None  # nobody read any answers


def test_grader_failures_are_left_out_not_scored_zero(make_samples):
    samples = make_samples("a", [[1.0, 1.0, None, None], [None] * 4], [["1", "1", None, None], [None] * 4])
    [score] = summarise(samples, [1, 4], 4)
    assert score.num_grader_errors == 6
    assert score.grader_error_fraction.value == 0.75
    assert score.num_short == 2
    assert score.avg.value == 1.0
    assert score.avg.num_questions == 1
    assert score.majority.value == 1.0
    assert score.pass_at[4] is None  # no question has four graded samples


def test_majority_by_question_and_only_where_answers_are_read(make_samples):
    voted = make_samples("a", [[1, 1, 0], [0, 0, 1]], [["7", "7", "8"], ["8", "8", "7"]])
    silent = make_samples("b", [[1, 1, 1]], first=2)
    a, b, overall = summarise(voted + silent, [1], 3)
    assert (a.majority.value, a.majority.num_questions) == (0.5, 2)
    assert b.majority is None
    assert overall.majority.num_questions == 2


def test_sources_by_name_and_then_all_together(make_samples):
    samples = make_samples("b", [[1] * 4]) + make_samples("a", [[0] * 4], first=1)
    scores = summarise(samples + make_samples("b", [[0] * 4], first=2), [1], 4)
    assert [score.data_source for score in scores] == ["a", "b", "overall"]
    assert scores[-1].avg.value == pytest.approx(1 / 3)
    assert scores[-1].num_questions == 3


def test_partial_reward_is_not_a_pass(make_samples):
    [score] = summarise(make_samples("a", [[0.5, 0.9, 0.5, 0.9]]), [4], 4)
    assert score.pass_at[4].value == 0.0
