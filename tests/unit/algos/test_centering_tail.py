"""Score centering outside the list: by hand, with a bound, and where nothing or less than nothing is left."""

from __future__ import annotations

import pytest
import torch

from rlctl.algos.rules import WeightRule
from rlctl.algos.score_centering import expected_score, score_factors

PLAIN = WeightRule(None, "truncate", upper=1.0)
AT_MOST = WeightRule("token", "truncate", upper=1.5)
MASK = WeightRule("token", "mask", lower=0.6, upper=1.5)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # the tails are 0.6 and 0.3: outside the list ρ is 2
        (PLAIN, 0.7 - 0.4 / 2),
        (AT_MOST, 0.7 * (0.4 / 0.7) - 0.4 * 1.5 / 2),
        (MASK, 0.0 - 0.0),  # 0.57 and 2 are both outside
    ],
)
def test_by_hand(rule: WeightRule, expected: float) -> None:
    found = score_factors(torch.tensor([[0.4]]).log(), torch.tensor([[0.7]]).log(), rule)
    assert found.tolist() == [[pytest.approx(expected, abs=1e-6)]]


def test_each_token_has_its_own_tail() -> None:
    trained, sampled = torch.tensor([[0.4], [0.9]]), torch.tensor([[0.7], [0.8]])
    together = score_factors(trained.log(), sampled.log(), PLAIN)
    assert together.flatten().tolist() == pytest.approx([0.7 - 0.4 * 0.3 / 0.6, 0.8 - 0.9 * 0.2 / 0.1])


@pytest.mark.parametrize("excess", [0.0, 1e-7, -1e-8])
def test_a_list_that_is_the_whole_vocabulary_leaves_nothing(excess: float) -> None:
    """Its sum may be more than 1 by rounding."""
    trained = torch.tensor([[0.5, 0.5 + excess]], dtype=torch.float64)
    sampled = torch.tensor([[0.25, 0.75 + excess]], dtype=torch.float64)
    found = score_factors(trained.log(), sampled.log(), PLAIN)
    torch.testing.assert_close(found, sampled - trained, rtol=0.0, atol=1e-6)


def test_the_score_is_the_sum_of_factors_times_log_probs() -> None:
    log_probs = torch.tensor([[0.4, 0.3]]).log().requires_grad_()
    rollout = torch.tensor([[0.7, 0.0]]).log()  # the second one is not listed
    expected_score(log_probs, rollout, AT_MOST).sum().backward()
    factors = score_factors(log_probs.detach(), rollout, AT_MOST)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[pytest.approx(float(factors[0, 0])), 0.0]]
