"""The range of a reward: declared by the spec or its graders, never guessed from rewards."""

import pytest
from pydantic import ValidationError

from rlctl.evaluate.scores import score_range, summarise
from rlctl.registry import GRADERS
from rlctl.run_spec.rollout import RewardSpec

MINE = "mine.py:score"


def spec(**section):
    return RewardSpec.model_validate(section)


def test_graders_declare_the_range_of_their_scores(make_samples):
    samples = make_samples("gsm8k", [[1.0, 0.0]])
    for name in ("maths", "exact", "multiple_choice", "countdown", "code", "auto"):
        assert score_range(spec(name=name), samples) == (0.0, 1.0)
    assert score_range(spec(name=MINE), samples) is None
    assert score_range(spec(name="model"), samples) is None
    assert {part.name for part in GRADERS.parts() if part.score_range is None} == {"auto", "judge", "model"}


def test_the_range_of_a_sum_is_that_of_its_terms(make_samples):
    samples = make_samples("gsm8k", [[0.0, -0.5]])
    terms = [{"name": "maths", "weight": 2.0}, {"name": "exact", "weight": -0.5}]
    assert score_range(spec(terms=terms), samples) == (-0.5, 2.0)
    assert score_range(spec(terms=[*terms, {"name": MINE, "weight": 1.0}]), samples) is None


def test_a_declared_range_holds_only_while_rewards_are_inside(make_samples):
    declared = spec(name=MINE, score_range=[0, 10])
    assert score_range(declared, make_samples("gsm8k", [[0.0, 10.0]])) == (0.0, 10.0)
    assert score_range(declared, make_samples("gsm8k", [[0.0, 11.0]])) is None
    for wrong in ([1, 0], [0, 0], [0], [0, float("inf")], "much"):
        with pytest.raises(ValidationError):
            spec(score_range=wrong)


def test_20_zeros_have_an_interval_only_on_a_known_scale(make_samples):
    samples = make_samples("gsm8k", [[0.0]] * 20)

    def interval(**section):
        [score] = summarise(samples, [1], 1, bounds=score_range(spec(**section), samples))
        return score.figures["avg"].low, score.figures["avg"].high, score.figures["pass@1"].high

    low, high, share = interval(name=MINE)
    assert (low, high) == (None, None)
    assert 0.1 < share < 0.25  # right or not is a share on any scale
    low, high, _ = interval(name=MINE, score_range=[0, 10])
    assert low == 0.0
    assert 1.0 < high < 2.5
