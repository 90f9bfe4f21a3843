"""Estimators per token against the slow reference; whitening and explained variance over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlctl.algos.metric_sums import Moments
from torch import Tensor

from rlctl.algos.token_advantages import (
    explained_variance,
    gae,
    optimal_token_baseline,
    reward_to_go,
    score_norms,
    whiten,
)
from tests.properties.batches import make_batch
from tests.reference import advantages as reference

DISCOUNTS = [(1.0, 1.0), (0.9, 0.7), (0.99, 0.0), (0.0, 0.5)]


def make_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards and values on a ragged batch (an empty row, one token, holes), NaN outside the mask."""
    mask = make_batch(seed).mask
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (
        torch.randn(mask.shape, generator=generator).masked_fill(~mask, math.nan) for _ in range(2)
    )
    return rewards, values, mask


@pytest.mark.parametrize(("gamma", "lam"), DISCOUNTS)
def test_gae_equals_the_reference(gamma: float, lam: float) -> None:
    for seed in range(10):
        rewards, values, mask = make_inputs(seed)
        advantages, returns = gae(rewards, values, mask, gamma, lam)
        rows = zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True)
        expected = torch.tensor([reference.gae(*row, gamma, lam) for row in rows])
        assert advantages.dtype == returns.dtype == torch.float32
        torch.testing.assert_close(torch.stack([advantages, returns], 1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reward_to_go_equals_the_reference(gamma: float) -> None:
    for seed in range(10):
        rewards, _, mask = make_inputs(seed)
        rows = zip(rewards.tolist(), mask.tolist(), strict=True)
        expected = torch.tensor([reference.reward_to_go(*row, gamma) for row in rows])
        torch.testing.assert_close(reward_to_go(rewards, mask, gamma), expected, rtol=1e-5, atol=1e-6)


def test_gae_by_hand() -> None:
    """γ = 0.5, λ = 1, a hole in the middle: the second token follows the first at once."""
    mask = torch.tensor([[True, False, True]])
    rewards, values = torch.tensor([[0.0, 7.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]])
    advantages, returns = gae(rewards, values, mask, 0.5, 1.0)
    assert advantages.tolist() == [[0.0, 0.0, 0.75]]  # 0.5 · 1 − 0.5; 1 − 0.25
    assert returns.tolist() == [[0.5, 0.0, 1.0]]


@pytest.mark.parametrize("seed", range(20))
def test_optimal_token_baseline_equals_the_reference(seed: int) -> None:
    rewards, _, mask = make_inputs(seed)
    batch = make_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 3, (len(mask),), generator=generator) * 50
    valid = torch.rand(len(mask), generator=generator) < 0.8
    probability = batch.log_probs.exp()
    sum_squares = probability**2 + (1 - probability) ** 2 * torch.rand(mask.shape, generator=generator)
    rewards = rewards.masked_fill(~valid[:, None], math.nan)
    inputs = (rewards, mask, groups, valid, batch.log_probs, sum_squares)
    expected = torch.tensor(reference.optimal_token_baseline(*(x.tolist() for x in inputs)))
    ours = (rewards, mask, groups, valid, score_norms(batch.log_probs, sum_squares))
    torch.testing.assert_close(optimal_token_baseline(*ours), expected, rtol=1e-4, atol=1e-5)
    order = torch.randperm(len(mask), generator=generator)
    found = optimal_token_baseline(*(x[order] for x in ours))
    torch.testing.assert_close(found, expected[order], rtol=1e-4, atol=1e-5)


def test_optimal_token_baseline_by_hand() -> None:
    """Binary choices: w = 2(1 − π)². Only the longer response has tokens in the tail."""
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [5.0, 0.0, 0.0]])
    probability = torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.5, 0.0], [0.5, 0.0, 0.0]])
    squares = probability**2 + (1 - probability) ** 2
    found = optimal_token_baseline(
        rewards, mask, torch.tensor([0, 0, 1]), torch.ones(3) > 0, score_norms(probability.log(), squares)
    )
    first, second = 0.5 / 0.52, 1.0 / 1.52  # W: 0.5 against 0.02, then 1 against 0.52
    expected = torch.tensor([[1 - first, 1 - second, 1.0], [-first, -second, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(found, expected)


def test_a_policy_without_choice_has_a_baseline_too() -> None:
    """Tokens of probability 1 have no gradient, but for rounding: W = 0 ± 1e-7 must not divide."""
    mask, certain = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2)
    groups, rewards = torch.zeros(2, dtype=torch.int64), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    for rounding in (0.0, -1.0e-7, 1.0e-7):
        squares = torch.tensor([[1.0 + rounding, 1.0], [1.0 - 0.9 * rounding, 1.0]], dtype=torch.float64)
        found = optimal_token_baseline(rewards, mask, groups, mask[0], score_norms(certain, squares))
        assert found.abs().max() <= 1.0  # a baseline among the returns


def on_two_ranks(function: Callable[..., Any], *inputs: Tensor, cut: int) -> list[Any]:
    """What each of two ranks computes from its own rows and the sums of both."""
    parts = [[x[rows] for x in inputs] for rows in (slice(None, cut), slice(cut, None))]
    of_ranks: list[list[Moments[Tensor]]] = [[], []]
    for part, calls in zip(parts, of_ranks, strict=True):
        function(*part, lambda own, calls=calls: calls.append(own) or own.to_host())
    merged = [(first + second).to_host() for first, second in zip(*of_ranks, strict=True)]
    of_whole = [iter(merged), iter(merged)]
    return [
        function(*part, lambda _, answers=answers: next(answers))
        for part, answers in zip(parts, of_whole, strict=True)
    ]


def whitened_in_parts(values: Tensor, mask: Tensor, cut: int) -> Tensor:
    return torch.cat(on_two_ranks(whiten, values, mask, cut=cut))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    cut=st.integers(1, 6),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    shift=st.floats(-1e3, 1e3),
)
def test_whitening_over_two_ranks_is_whitening_of_the_batch(seed, cut, scale, shift) -> None:
    values, _, mask = make_inputs(seed)
    values = values * scale + shift
    found = whitened_in_parts(values, mask, cut)
    expected = torch.tensor(reference.whitened(values[mask].tolist()))
    torch.testing.assert_close(found[mask], expected, rtol=1e-4, atol=1e-4)
    assert not found[~mask].any()


def test_whitening_what_does_not_vary_gives_zero() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert not whitened_in_parts(torch.full((2, 3), 0.1), mask, 1).any()
    lone = torch.tensor([[False, False, False], [True, False, False]])
    assert not whitened_in_parts(torch.full((2, 3), 5.0), lone, 1).any()
    assert not whitened_in_parts(torch.full((2, 3), math.nan), lone & False, 1).any()


@pytest.mark.parametrize("seed", range(10))
def test_explained_variance_over_two_ranks(seed: int) -> None:
    returns, noise, mask = make_inputs(seed)
    values = returns + 0.5 * noise + 3.0  # a constant error does not count

    def explained(predicted: Tensor) -> float:
        first, second = on_two_ranks(explained_variance, returns, predicted, mask, cut=3)
        assert first == second
        return float(first)

    r, v = returns[mask].double(), values[mask].double()
    expected = 1.0 - ((r - v).var() / r.var()).item()
    assert explained(values) == pytest.approx(expected, rel=1e-6)
    assert explained(returns) == pytest.approx(1.0)
    assert explained(torch.full_like(returns, 0.3)) == pytest.approx(0.0, abs=1e-6)


def test_returns_that_do_not_vary_leave_nothing_to_explain() -> None:
    returns, mask = torch.full((2, 3), 0.1), torch.ones(2, 3, dtype=torch.bool)
    assert explained_variance(returns, torch.randn(2, 3), mask, Moments.to_host) == 0.0
    assert explained_variance(returns, returns, ~mask, Moments.to_host) == 0.0


@pytest.mark.parametrize("unit", [1e-14, 1e-6, 1.0, 1e12])
def test_explained_variance_does_not_depend_on_the_unit_of_reward(unit: float) -> None:
    returns, noise, mask = make_inputs(0)
    values = returns + 0.5 * noise
    known, scaled = (explained_variance(c * returns, c * values, mask, Moments.to_host) for c in (1.0, unit))
    assert 0.1 < known < 0.99
    assert scaled == pytest.approx(known, rel=1e-5)
