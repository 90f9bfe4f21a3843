import pytest

from rlctl.evaluate.scores import QuestionScores, summarise


def question(source, rewards, num_samples=4, truncated=0, tokens=8):
    return QuestionScores(source, list(rewards), num_samples, truncated, tokens)


def test_figures_of_one_source():
    [score] = summarise([question("a", [1, 0, 0, 0]), question("a", [1, 1, 1, 1], truncated=2)], [1, 4])
    assert score.avg.value == pytest.approx(0.625)
    assert score.pass_at[1].value == pytest.approx(0.625)
    assert score.pass_at[4].value == 1.0
    assert (score.num_questions, score.num_samples) == (2, 8)
    assert score.truncated_fraction == 0.25
    assert score.mean_length == 2.0


def test_grader_failures_are_left_out_not_scored_zero():
    [score] = summarise([question("a", [1.0, 1.0]), question("a", [])], [1, 4])
    assert score.num_grader_errors == 6
    assert score.avg.value == 1.0
    assert score.avg.num_questions == 1
    assert score.pass_at[4] is None  # no question has four graded samples


def test_sources_by_name_and_then_all_together():
    scores = summarise([question("b", [1] * 4), question("a", [0] * 4), question("b", [0] * 4)], [1])
    assert [score.data_source for score in scores] == ["a", "b", "overall"]
    assert scores[-1].avg.value == pytest.approx(1 / 3)
    assert scores[-1].num_questions == 3


def test_partial_reward_is_not_a_pass():
    [score] = summarise([question("a", [0.5, 0.9, 0.5, 0.9])], [4])
    assert score.pass_at[4].value == 0.0
