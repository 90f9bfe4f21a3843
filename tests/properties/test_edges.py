"""What the rules do exactly on an edge: an advantage of 0, a mean of 0, one candidate or none."""

from __future__ import annotations

import pytest
import torch

from rlctl.algos.batch_losses import ClipCovParams, M2poParams, WholeBatch
from rlctl.algos.correction import correct
from rlctl.algos.losses import policy_loss
from rlctl.algos.rules import CorrectionRules, LossRule, RejectRule, WeightRule
from rlctl.algos.segments import Segments, Units
from rlctl.algos.weights_and_criteria import SelectiveParams
from tests.properties.batches import estimate

RESPONSE = Segments(torch.tensor([4]))
UNITS = Units(RESPONSE, RESPONSE, RESPONSE)


@pytest.mark.parametrize(("advantage", "kept"), [(-1e-6, False), (0.0, True), (-0.0, True), (1e-6, True)])
def test_off_policy_rejects_only_below_an_advantage_of_zero(advantage: float, kept: bool) -> None:
    rollout = torch.full((4,), -3.0)
    rule = RejectRule("off_policy", "k1", "mean", None, 0.1, "sequence", negative_advantage_only=True)
    rules = CorrectionRules(WeightRule(None), (rule,))
    found = correct(rollout - 1.0, rollout, UNITS, rules, advantages=torch.full((4,), advantage))
    assert found.keep.all() == kept


@pytest.mark.parametrize("bound", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 2.0, 8.0])
def test_selective_accepts_with_the_ratio_over_its_bound(ratio: float, bound: float) -> None:
    chance = min(1.0, ratio / bound)
    rollout = torch.full((4,), -6.0, dtype=torch.float64)
    level = WeightRule("selective", "truncate", upper=1e9, params=SelectiveParams(bound=bound))
    found = correct(rollout + torch.tensor(ratio).double().log(), rollout, UNITS, CorrectionRules(level))
    expected = torch.full((4,), chance + (1.0 - chance) * ratio)
    torch.testing.assert_close(found.weights, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 3.0], [-0.5, 0.5]),
        ([-1.0, 1.0], [0.0, 0.0]),  # the mean is 0
        ([-3.0, 1.0], [0.0, 0.0]),  # below 0 the sign would turn
    ],
)
def test_maxrl_is_zero_where_the_mean_is_not_positive(rewards: list[float], expected: list[float]) -> None:
    group = torch.zeros(2, dtype=torch.int64)
    found = estimate("maxrl", torch.tensor(rewards), group)
    assert found.tolist() == expected


def clip_cov_gradient(params: ClipCovParams, log_probs: list[float], advantages: list[float]) -> list[float]:
    """−∂ Σ loss/∂log π_θ of each token of one response, on-policy."""
    leaf = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    given = (leaf.detach(), torch.tensor(advantages, dtype=torch.float64), RESPONSE)
    rule = WholeBatch(leaf, *given).with_statistics(LossRule("clip_cov", params=params))
    (gradient,) = torch.autograd.grad(policy_loss(rule, leaf, *given, None).values.sum(), leaf)
    return (-gradient).tolist()


@pytest.mark.parametrize(
    ("fraction", "low", "kept"),
    [
        (1e-4, 1.0, 0.5),  # at least one of the two candidates is dropped, on average half of each
        (0.25, 1.0, 0.5),  # a quarter of four tokens: one
        (0.5, 1.0, 0.0),  # both
        (1.0, 1.0, 0.0),  # more than there are: none is turned round
        (1e-4, 4.9, 1.0),  # no candidate: PPO's clip
    ],
)
def test_clip_cov_drops_at_least_one_candidate_and_at_most_all(
    fraction: float, low: float, kept: float
) -> None:
    """(A − mean A)(log π − mean log π) is 4 for the first two tokens and −4 for the others."""
    params = ClipCovParams(fraction=fraction, low=low, high=5.0)
    found = clip_cov_gradient(params, [-1.0, -5.0, -1.0, -5.0], [2.0, -2.0, -2.0, 2.0])
    assert found == pytest.approx([2.0 * kept, -2.0 * kept, -2.0, 2.0])


def m2po_dropped(log_ratios: list[float], budget: float) -> list[bool]:
    """Tokens with A = 1 that the loss drops."""
    old = torch.full((len(log_ratios),), -5.0, dtype=torch.float64)
    new = old + torch.tensor(log_ratios, dtype=torch.float64)
    given = (old, torch.ones_like(old), Segments(torch.tensor([len(log_ratios)])))
    rule = WholeBatch(new, *given).with_statistics(LossRule("m2po", params=M2poParams(budget=budget)))
    return policy_loss(rule, new, *given, None).clipped.tolist()


@pytest.mark.parametrize(
    ("log_ratios", "budget", "dropped"),
    [
        ([0.5, 0.5], 0.25, [False, False]),  # a mean equal to the budget is within it; AReaL drops
        ([0.5, 0.5, 0.1], 0.2, [False, False, False]),
        ([0.5, 0.5, 0.1], 0.15, [True, True, False]),  # equal values together; AReaL may drop one of them
        ([0.5, 0.75], 0.1, [True, True]),  # AReaL always keeps one
        ([-3.0, 0.5], 0.25, [False, False]),  # −3 moves back towards π_old; AReaL counts it
    ],
)
def test_where_m2po_ends(log_ratios: list[float], budget: float, dropped: list[bool]) -> None:
    assert m2po_dropped(log_ratios, budget) == dropped
