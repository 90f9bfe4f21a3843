"""Losses and aggregation: against the slow reference, and gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlctl.algos.aggregate import Denominators, aggregate
from rlctl.algos.losses import TokenLoss, ppo_clip, reinforce
from tests.properties.batches import Batch, make_batch
from tests.reference import losses as reference

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
HORIZON = 6


def make_inputs(seed: int) -> tuple[Batch, Tensor, Tensor]:
    """A batch, a loss mask that leaves some response tokens out, and weights (NaN where masked out)."""
    batch = make_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    loss_mask = batch.mask & (torch.rand(batch.mask.shape, generator=generator) < 0.8)
    weights = torch.rand(batch.mask.shape, generator=generator) * 2
    return batch, loss_mask, weights.masked_fill(~loss_mask, math.nan)


def compute(
    loss_type: str, log_probs: Tensor, batch: Batch, loss_mask: Tensor, weights: Tensor | None
) -> TokenLoss:
    if loss_type == "reinforce":
        return reinforce(log_probs, batch.advantages, loss_mask, weights)
    return ppo_clip(log_probs, batch.rollout_log_probs, batch.advantages, loss_mask, weights, **CLIPS)


def whole(counted: Tensor) -> Denominators:
    return Denominators(float(counted.sum()), float(counted.any(-1).sum()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_type", ["reinforce", "ppo_clip"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("denominator", ["before_rejection", "after_rejection"])
def test_equals_the_reference(mode, loss_type, weighted: bool, denominator: str) -> None:
    for seed in range(5):
        batch, loss_mask, weights = make_inputs(seed)
        found = compute(loss_type, batch.log_probs, batch, loss_mask, weights if weighted else None)
        values = [[0.0] * HORIZON for _ in batch.mask]
        clipped = [[False] * HORIZON for _ in batch.mask]
        for row, t in loss_mask.nonzero().tolist():
            theta, old, advantage, weight = (
                x[row, t].item()
                for x in (batch.log_probs, batch.rollout_log_probs, batch.advantages, weights)
            )
            weight = weight if weighted else 1.0
            if loss_type == "reinforce":
                values[row][t] = reference.reinforce(theta, advantage, weight)
            else:
                values[row][t], clipped[row][t] = reference.ppo_clip(theta, old, advantage, weight, **CLIPS)
        torch.testing.assert_close(found.values, torch.tensor(values), rtol=1e-5, atol=1e-6)
        if found.clipped is not None:
            assert found.clipped.tolist() == clipped

        counted = batch.mask if denominator == "before_rejection" else loss_mask
        total = aggregate(found.values, counted, whole(counted), mode, horizon=HORIZON)
        expected = reference.aggregate(values, counted.tolist(), mode, HORIZON)
        assert total.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_type", ["reinforce", "ppo_clip"])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_equals_finite_differences(mode, loss_type, seed: int) -> None:
    batch, loss_mask, weights = make_inputs(seed)
    weights = weights.double()

    def total(log_probs: Tensor) -> Tensor:
        values = compute(loss_type, log_probs, batch, loss_mask, weights).values
        return aggregate(values, batch.mask, whole(batch.mask), mode, horizon=HORIZON)

    log_probs = batch.log_probs.double().requires_grad_()
    (gradient,) = torch.autograd.grad(total(log_probs), log_probs)
    step = 1e-6
    for row, t in batch.mask.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            moved = log_probs.detach().clone()
            moved[row, t] += sign * step
            ends.append(total(moved).item())
        slope = (ends[0] - ends[1]) / (2 * step)
        assert gradient[row, t].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)
    assert not gradient[~loss_mask].any()


def test_neither_weights_nor_advantages_nor_old_log_probs_receive_gradient() -> None:
    batch, loss_mask, weights = make_inputs(0)
    weights.requires_grad_()
    log_probs = batch.log_probs.clone().requires_grad_()
    for loss_type in ("reinforce", "ppo_clip"):
        values = compute(loss_type, log_probs, batch, loss_mask, weights).values
        assert torch.autograd.grad(values.sum(), weights, allow_unused=True)[0] is None


def test_ppo_clips_only_in_the_direction_that_would_gain() -> None:
    """By hand: r = 2 and r = 0.5 against a clip to [0.8, 1.3], both signs of the advantage."""
    log_ratio = torch.tensor([[2.0, 0.5, 2.0, 0.5]]).log()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    ones = torch.ones(1, 4, dtype=torch.bool)
    log_probs = log_ratio.requires_grad_()
    loss = ppo_clip(log_probs, torch.zeros(1, 4), advantages, ones, None, **CLIPS)
    torch.testing.assert_close(loss.values, torch.tensor([[-1.3, -0.5, 2.0, 0.8]]))
    assert loss.clipped.tolist() == [[True, False, False, True]]
    (gradient,) = torch.autograd.grad(loss.values.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -0.5, 2.0, 0.0]]))


def test_a_mean_of_nothing_is_zero() -> None:
    values, nothing = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    for mode in MODES:
        assert aggregate(values, nothing, whole(nothing), mode, horizon=3).item() == 0.0
