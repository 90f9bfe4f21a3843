"""Estimators per token against the slow reference; whitening and explained variance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlctl.algos.estimators import (
    AdvantageInputs,
    estimate,
    explained_variance,
    gae_recursion,
    reward_to_go,
    score_norms,
    whiten,
)
from rlctl.algos.segments import Segments, Units
from tests.properties.batches import by_response, make_batch
from tests.reference import advantages as reference

DISCOUNTS = [(1.0, 1.0), (0.9, 0.7), (0.99, 0.0), (0.0, 0.5)]


def make_inputs(seed: int) -> tuple[Tensor, Tensor, Segments]:
    """Rewards and values of a ragged batch (an empty response, one token)."""
    unit = make_batch(seed).unit
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(unit.total, generator=generator) for _ in range(2))
    return rewards, values, unit


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
def test_gae_equals_the_reference(gamma: float, lam: float) -> None:
    for seed in range(10):
        rewards, values, unit = make_inputs(seed)
        advantages, returns = gae_recursion(rewards, values, unit, gamma, lam)
        assert advantages.dtype == returns.dtype == torch.float64
        rows = by_response(unit, rewards, values, advantages, returns)
        for of_rewards, of_values, *found in rows:
            every = [True] * len(of_rewards)
            expected = reference.gae(of_rewards, of_values, every, gamma, lam)
            assert found == [pytest.approx(wanted, rel=1e-5, abs=1e-6) for wanted in expected]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reward_to_go_equals_the_reference(gamma: float) -> None:
    for seed in range(10):
        rewards, _, unit = make_inputs(seed)
        for given_rewards, found in by_response(unit, rewards, reward_to_go(rewards, unit, gamma)):
            expected = reference.reward_to_go(given_rewards, [True] * len(found), gamma)
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_gae_by_hand() -> None:
    """γ = 0.5, λ = 1."""
    rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
    advantages, returns = gae_recursion(rewards, values, Segments(torch.tensor([2])), 0.5, 1.0)
    assert advantages.tolist() == [0.0, 0.75]  # 0.5 · 1 − 0.5; 1 − 0.25
    assert returns.tolist() == [0.5, 1.0]


def test_a_batch_without_tokens_has_no_advantages() -> None:
    for lengths in ([], [0, 0]):
        nothing = torch.zeros(0)
        found = gae_recursion(nothing, nothing, Segments(torch.tensor(lengths, dtype=torch.int64)), 0.9, 0.9)
        assert [len(column) for column in found] == [0, 0]


def token_baseline(rewards: Tensor, unit: Segments, groups: Tensor, norms: Tensor) -> Tensor:
    units = Units(unit, unit, unit)
    inputs = AdvantageInputs(
        rewards, unit.sum(rewards), units, groups, 1.0, 1.0, divide_by_std=True, score_norms=norms
    )
    return estimate("optimal_token_baseline", inputs).advantages


@pytest.mark.parametrize("seed", range(20))
def test_optimal_token_baseline_equals_the_reference(seed: int) -> None:
    """Members that were not graded are missing from the batch."""
    rewards, _, unit = make_inputs(seed)
    log_probs = make_batch(seed).log_probs
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 3, (len(unit),), generator=generator) * 50
    valid = torch.rand(len(unit), generator=generator) < 0.8
    probability = log_probs.exp()
    squares = probability**2 + (1 - probability) ** 2 * torch.rand(unit.total, generator=generator)
    rows = [unit.padded(x).tolist() for x in (rewards, torch.ones(unit.total) > 0)]
    rows += [groups.tolist(), valid.tolist(), *(unit.padded(x).tolist() for x in (log_probs, squares))]
    expected = unit.flat(torch.tensor(reference.optimal_token_baseline(*rows)))
    norms = score_norms(log_probs, squares)

    def found(members: Tensor) -> tuple[Tensor, Tensor]:
        places = unit.entries_of(members)
        lengths = Segments(unit.lengths[members])
        return places, token_baseline(rewards[places], lengths, groups[members], norms[places])

    graded = valid.nonzero().squeeze(1)
    for members in (graded, graded[torch.randperm(len(graded), generator=generator)]):
        places, advantages = found(members)
        torch.testing.assert_close(advantages, expected[places], rtol=1e-4, atol=1e-5)


def test_optimal_token_baseline_by_hand() -> None:
    """Binary choices: w = 2(1 − π)². Only the longer response has tokens in the tail."""
    unit = Segments(torch.tensor([3, 2, 1]))
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 5.0])
    probability = torch.tensor([0.5, 0.5, 0.5, 0.9, 0.5, 0.5])
    norms = score_norms(probability.log(), probability**2 + (1 - probability) ** 2)
    found = token_baseline(rewards, unit, torch.tensor([0, 0, 1]), norms)
    first, second = 0.5 / 0.52, 1.0 / 1.52  # W: 0.5 against 0.02, then 1 against 0.52
    expected = torch.tensor([1 - first, 1 - second, 1.0, -first, -second, 0.0])
    torch.testing.assert_close(found, expected)


def test_a_policy_without_choice_has_a_baseline_too() -> None:
    """Tokens of probability 1 have no gradient, but for rounding: W = 0 ± 1e-7 must not divide."""
    unit, groups = Segments(torch.tensor([2, 2])), torch.zeros(2, dtype=torch.int64)
    rewards, certain = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.zeros(4)
    for rounding in (0.0, -1.0e-7, 1.0e-7):
        squares = torch.tensor([1.0 + rounding, 1.0, 1.0 - 0.9 * rounding, 1.0], dtype=torch.float64)
        found = token_baseline(rewards, unit, groups, score_norms(certain, squares))
        assert found.abs().max() <= 1.0  # a baseline among the returns


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), scale=st.sampled_from([1e-3, 1.0, 1e4]), shift=st.floats(-1e3, 1e3))
def test_whitening_equals_the_reference(seed: int, scale: float, shift: float) -> None:
    values = make_inputs(seed)[0] * scale + shift
    expected = torch.tensor(reference.whitened(values.tolist()))
    torch.testing.assert_close(whiten(values), expected, rtol=1e-4, atol=1e-4)


def test_whitening_what_does_not_vary_gives_zero() -> None:
    for count in range(1, 12):
        assert not whiten(torch.full((count,), 0.1)).any()
        assert not whiten(torch.full((count,), 123.4)).any()
    assert len(whiten(torch.zeros(0))) == 0


@pytest.mark.parametrize("seed", range(10))
def test_explained_variance(seed: int) -> None:
    returns, noise, _ = make_inputs(seed)
    values = returns + 0.5 * noise + 3.0  # a constant error does not count
    r, v = returns.double(), values.double()
    expected = 1.0 - ((r - v).var() / r.var()).item()
    assert explained_variance(returns, values) == pytest.approx(expected, rel=1e-6)
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(returns, torch.full_like(returns, 0.3)) == pytest.approx(0.0, abs=1e-6)


def test_returns_that_do_not_vary_leave_nothing_to_explain() -> None:
    assert explained_variance(torch.full((6,), 0.1), torch.randn(6)) == 0.0
    assert explained_variance(torch.zeros(0), torch.zeros(0)) == 0.0


@pytest.mark.parametrize("unit", [1e-14, 1e-6, 1.0, 1e12])
def test_explained_variance_does_not_depend_on_the_unit_of_reward(unit: float) -> None:
    returns, noise, _ = make_inputs(0)
    values = returns + 0.5 * noise
    known, scaled = (explained_variance(c * returns, c * values) for c in (1.0, unit))
    assert 0.1 < known < 0.99
    assert scaled == pytest.approx(known, rel=1e-5)
