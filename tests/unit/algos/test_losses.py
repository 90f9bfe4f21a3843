"""Policy losses and aggregation: against the slow reference, and gradients against finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlctl.algos.losses import Denominators, TokenLoss, aggregate, policy_loss
from rlctl.algos.rules import LossRule
from rlctl.registry import POLICY_LOSSES
from tests.properties.batches import Batch, make_batch
from tests.reference import losses as reference

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
RULES = {
    "reinforce": LossRule("reinforce"),
    "ppo": LossRule("ppo_clip", clip_low=0.2, clip_high=0.3),
    "dual_clip": LossRule("ppo_clip", clip_low=0.2, clip_high=0.3, clip_c=1.4),
    "gspo": LossRule("gspo", clip_low=0.1, clip_high=0.15),
    "cispo": LossRule("cispo", clip_low=0.3, clip_high=0.2),
    "sapo": LossRule("sapo", tau_pos=1.0, tau_neg=1.5),
    "dppo_tv": LossRule("dppo", clip_low=0.05, clip_high=0.1),
    "dppo_kl": LossRule("dppo", clip_low=0.01, clip_high=0.02, clip_c=1.3, divergence="kl"),
}
HORIZON = 6


def make_inputs(seed: int) -> tuple[Batch, Tensor, Tensor]:
    """A batch, a loss mask that leaves some response tokens out, and weights (NaN where masked out)."""
    batch = make_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    loss_mask = batch.mask & (torch.rand(batch.mask.shape, generator=generator) < 0.8)
    token_noise = torch.randn(batch.mask.shape, generator=generator)  # a critic's advantages differ by token
    weights = torch.rand(batch.mask.shape, generator=generator) * 2
    batch = Batch(batch.log_probs, batch.rollout_log_probs, batch.mask, batch.advantages + 0.3 * token_noise)
    return batch, loss_mask, weights.masked_fill(~loss_mask, math.nan)


def compute(
    rule: LossRule, log_probs: Tensor, batch: Batch, loss_mask: Tensor, weights: Tensor | None
) -> TokenLoss:
    advantages = batch.advantages.masked_fill(~loss_mask, math.nan)
    return policy_loss(rule, log_probs, batch.rollout_log_probs, advantages, loss_mask, weights)


def by_reference(rule, log_probs, batch: Batch, loss_mask, weights) -> list[list[tuple[float, bool, bool]]]:
    """`log_probs` move, `batch.log_probs` are what the stopped gradients see."""
    weights = torch.ones_like(batch.advantages) if weights is None else weights
    tensors = (log_probs, batch.log_probs, batch.rollout_log_probs, batch.advantages, weights, loss_mask)
    return [reference.policy_loss(rule, *rows) for rows in zip(*(x.tolist() for x in tensors), strict=True)]


def whole(counted: Tensor) -> Denominators:
    return Denominators(float(counted.sum()), float(counted.any(-1).sum()))


def test_every_stable_loss_of_the_spec_is_there() -> None:
    assert set(POLICY_LOSSES.stable()) == {rule.name for rule in RULES.values()}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_equals_the_reference(rule: LossRule, weighted: bool) -> None:
    in_force = torch.zeros(2)
    for seed in range(20):
        batch, loss_mask, weights = make_inputs(seed)
        found = compute(rule, batch.log_probs, batch, loss_mask, weights if weighted else None)
        expected = by_reference(rule, batch.log_probs, batch, loss_mask, weights if weighted else None)
        values, clipped, lower = torch.tensor(expected, dtype=torch.float64).unbind(-1)
        torch.testing.assert_close(found.values, values.float(), rtol=1e-5, atol=1e-6)
        for flags, wanted in ((found.clipped, clipped), (found.clipped_lower, lower)):
            assert torch.equal(torch.zeros_like(loss_mask) if flags is None else flags, wanted.bool())
        in_force += torch.stack([clipped.sum(), lower.sum()])
    assert bool(in_force[0]) == (rule.name not in {"reinforce", "sapo"})  # else the test tests nothing
    assert bool(in_force[1]) == (rule.clip_c is not None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("denominator", ["before_rejection", "after_rejection"])
def test_aggregation_equals_the_reference(mode, denominator: str) -> None:
    for seed in range(10):
        batch, loss_mask, weights = make_inputs(seed)
        values = compute(RULES["ppo"], batch.log_probs, batch, loss_mask, weights).values
        counted = batch.mask if denominator == "before_rejection" else loss_mask
        total = aggregate(values, counted, whole(counted), mode, horizon=HORIZON)
        expected = reference.aggregate(values.tolist(), counted.tolist(), mode, HORIZON)
        assert total.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradient_equals_finite_differences_of_the_reference(rule: LossRule, mode) -> None:
    batch, loss_mask, weights = make_inputs(3)
    batch = Batch(
        batch.log_probs.double(), batch.rollout_log_probs.double(), batch.mask, batch.advantages.double()
    )
    weights = weights.double()

    def slow_total(log_probs: Tensor) -> float:
        expected = by_reference(rule, log_probs, batch, loss_mask, weights)
        values = [[token[0] for token in row] for row in expected]
        return reference.aggregate(values, batch.mask.tolist(), mode, HORIZON)

    log_probs = batch.log_probs.clone().requires_grad_()
    values = compute(rule, log_probs, batch, loss_mask, weights).values
    total = aggregate(values, batch.mask, whole(batch.mask), mode, horizon=HORIZON)
    (gradient,) = torch.autograd.grad(total, log_probs)
    step = 1e-6
    for row, t in batch.mask.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            moved = batch.log_probs.clone()
            moved[row, t] += sign * step
            ends.append(slow_total(moved))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert gradient[row, t].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)
    assert gradient[loss_mask].any()
    assert not gradient[~loss_mask].any()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_neither_weights_nor_old_log_probs_receive_gradient(rule: LossRule) -> None:
    batch, loss_mask, weights = make_inputs(0)
    log_probs, old = (x.clone().requires_grad_() for x in (batch.log_probs, batch.rollout_log_probs))
    weights.requires_grad_()
    loss = policy_loss(rule, log_probs, old, batch.advantages, loss_mask, weights)
    assert torch.autograd.grad(loss.values.sum(), [weights, old], allow_unused=True) == (None, None)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(rule: LossRule) -> None:
    batch, loss_mask, weights = make_inputs(1)
    log_probs = batch.log_probs.clone().requires_grad_()
    loss = policy_loss(rule, log_probs, batch.log_probs, batch.advantages, loss_mask, weights)
    (gradient,) = torch.autograd.grad(loss.values.sum(), log_probs)
    expected = torch.where(loss_mask, -weights * batch.advantages, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)
    assert not any(flags is not None and flags.any() for flags in (loss.clipped, loss.clipped_lower))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_ratios_out_of_all_bounds_leave_numbers(rule: LossRule) -> None:
    """Log-ratios of ±100 and tokens of probability 1, as a broken sampler reports them."""
    log_probs = torch.tensor([[-100.0, -1e-9, 0.0, -90.0, 0.0]]).requires_grad_()
    old = torch.tensor([[-1e-9, -100.0, 0.0, 0.0, -90.0]])
    for advantage in (1.0, -1.0):
        every = torch.ones(1, 5, dtype=torch.bool)
        loss = policy_loss(rule, log_probs, old, torch.full((1, 5), advantage), every, None)
        (gradient,) = torch.autograd.grad(loss.values.sum(), log_probs)
        assert loss.values.isfinite().all()
        assert gradient.isfinite().all()


def row_loss(rule: LossRule, ratios: list[float], advantages: list[float]) -> tuple[TokenLoss, Tensor]:
    """One sequence under a uniform π_old of probability 0.1; the loss and its gradient."""
    old = torch.full((1, len(ratios)), 0.1).log()
    log_probs = (torch.tensor([ratios]).log() + old).requires_grad_()
    every = torch.ones(1, len(ratios), dtype=torch.bool)
    loss = policy_loss(rule, log_probs, old, torch.tensor([advantages]), every, None)
    return loss, torch.autograd.grad(loss.values.sum(), log_probs)[0]


def test_ppo_clips_only_in_the_direction_that_would_gain() -> None:
    """By hand: r = 2 and r = 0.5 against a clip to [0.8, 1.3], both signs of the advantage."""
    loss, gradient = row_loss(RULES["ppo"], [2.0, 0.5, 2.0, 0.5], [1.0, 1.0, -1.0, -1.0])
    torch.testing.assert_close(loss.values, torch.tensor([[-1.3, -0.5, 2.0, 0.8]]))
    assert loss.clipped.tolist() == [[True, False, False, True]]
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -0.5, 2.0, 0.0]]))


def test_dual_clip_holds_a_runaway_ratio_of_a_bad_token() -> None:
    rule = LossRule("ppo_clip", clip_c=3.0)
    loss, gradient = row_loss(rule, [5.0, 2.5, 5.0], [-1.0, -1.0, 1.0])
    torch.testing.assert_close(loss.values, torch.tensor([[3.0, 2.5, -1.2]]))
    assert loss.clipped_lower.tolist() == [[True, False, False]]
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 2.5, 0.0]]))


def test_cispo_clips_weights_and_keeps_gradients() -> None:
    _, gradient = row_loss(LossRule("cispo"), [2.0, 0.5, 1.1], [1.0, -1.0, 1.0])
    torch.testing.assert_close(gradient, torch.tensor([[-1.2, 0.8, -1.1]]))


def test_dppo_clips_by_probabilities_not_ratios() -> None:
    """A tenth may double (TV 0.1) but not quadruple (TV 0.3); changes towards the sampler are never
    masked."""
    rule = LossRule("dppo", clip_low=0.15, clip_high=0.15)
    loss, gradient = row_loss(rule, [2.0, 4.0, 4.0, 0.1], [1.0, 1.0, -1.0, -1.0])
    assert loss.clipped.tolist() == [[False, True, False, False]]
    torch.testing.assert_close(gradient, torch.tensor([[-2.0, 0.0, 4.0, 0.1]]))


def test_gspo_gradient_is_that_of_the_sequence_objective() -> None:
    """Differentiated through the mean, as the paper writes it; equal advantages within a sequence."""
    batch, loss_mask, _ = make_inputs(4)
    advantages = torch.randn(len(batch.mask), 1, generator=torch.Generator().manual_seed(4))
    rule = RULES["gspo"]
    log_probs = batch.log_probs.clone().requires_grad_()
    old, spread = batch.rollout_log_probs, advantages.expand_as(log_probs)
    values = policy_loss(rule, log_probs, old, spread, loss_mask, None).values
    total = aggregate(values, loss_mask, whole(loss_mask), "seq-mean-token-mean", horizon=HORIZON)
    (gradient,) = torch.autograd.grad(total, log_probs)

    objective = torch.zeros(())
    for row in range(len(loss_mask)):
        if loss_mask[row].any():
            ratio = (log_probs[row] - old[row])[loss_mask[row]].mean().exp()
            advantage = advantages[row, 0]
            clipped = ratio.clamp(1 - rule.clip_low, 1 + rule.clip_high)
            objective = objective + torch.minimum(ratio * advantage, clipped * advantage)
    loss = -objective / loss_mask.any(-1).sum()
    assert total.item() == pytest.approx(loss.item(), rel=1e-5)
    (expected,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("mode", "expected"), zip(MODES, [3.0, 6.0, 3.0, 1.5], strict=True))
def test_the_mean_of_one_sequence_is_its_own(mode, expected: float) -> None:
    values, counted = torch.tensor([[2.0, 4.0, 0.0, 0.0]]), torch.tensor([[True, True, False, False]])
    assert aggregate(values, counted, whole(counted), mode, horizon=4).item() == expected
    one = torch.tensor([[True, False]])  # and of one token
    total = aggregate(torch.tensor([[6.0, 0.0]]), one, whole(one), mode, horizon=2).item()
    assert total == (3.0 if mode == "seq-mean-token-sum-norm" else 6.0)


def test_a_mean_of_nothing_is_zero() -> None:
    values, nothing = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    for mode in MODES:
        assert aggregate(values, nothing, whole(nothing), mode, horizon=3).item() == 0.0
