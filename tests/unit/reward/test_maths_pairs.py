"""Each kind of response in maths_pairs.txt is graded as the file says."""

from collections import defaultdict

import pytest

from rlctl.reward import maths
from tests.unit.reward.maths_pairs import pairs

BY_KIND = defaultdict(list)
for pair in pairs(42):
    BY_KIND[pair.kind].append(pair)


@pytest.mark.parametrize("kind", BY_KIND)
def test_a_kind_of_response_is_graded_as_the_file_says(kind):
    wrong = [pair for pair in BY_KIND[kind] if maths.grade(pair.response, pair.ground_truth) != pair.score]
    assert not wrong


def test_there_are_right_and_wrong_responses():
    scores = [pair.score for of_kind in BY_KIND.values() for pair in of_kind]
    assert 0.3 < sum(scores) / len(scores) < 0.7
    assert len(scores) > 600
