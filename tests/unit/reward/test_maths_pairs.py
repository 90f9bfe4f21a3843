"""Each kind of response in maths_pairs.txt is graded as the file says."""

from collections import defaultdict

import pytest

from rlctl.reward import maths
from tests.unit.reward.maths_pairs import pairs

BY_KIND = defaultdict(list)
for pair in pairs(42):
    BY_KIND[pair.kind].append(pair)


#: The kind that is read and compared as mathematics, which takes most of the time. Of each of its ground
#: truths `make test` tries one right and one wrong response, and `make test-all` the others.
EQUAL = "equal expressions"
SAMPLE = list({(pair.ground_truth, pair.score): pair for pair in BY_KIND[EQUAL]}.values())


def wrongly_graded(tried):
    return [pair for pair in tried if maths.grade(pair.response, pair.ground_truth) != pair.score]


@pytest.mark.parametrize("kind", BY_KIND)
def test_a_kind_of_response_is_graded_as_the_file_says(kind):
    assert not wrongly_graded(SAMPLE if kind == EQUAL else BY_KIND[kind])


@pytest.mark.thorough
def test_all_other_equal_expressions_are_graded_as_the_file_says():
    assert not wrongly_graded(pair for pair in BY_KIND[EQUAL] if pair not in SAMPLE)


def test_there_are_right_and_wrong_responses():
    scores = [pair.score for of_kind in BY_KIND.values() for pair in of_kind]
    assert 0.3 < sum(scores) / len(scores) < 0.7
    assert len(scores) > 600
