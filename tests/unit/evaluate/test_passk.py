from itertools import combinations

import pytest

from rlctl.evaluate.scores import pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_equals_the_share_of_subsets_that_hold_a_right_one(n):
    for c in range(n + 1):
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(right, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-14)


def test_edges_are_exact():
    assert pass_at_k(8, 1, 8) == 1.0
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 8, 1) == 1.0
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (0, 0, 1), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_estimated_is_refused(n, c, k):
    with pytest.raises(ValueError, match="responses"):
        pass_at_k(n, c, k)
