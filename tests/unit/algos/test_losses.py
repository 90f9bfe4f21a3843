"""Policy losses and aggregation: against the slow reference, and gradients against finite differences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlctl.algos.losses import LossInputs, TokenLoss, coefficients, policy_loss
from rlctl.algos.rules import LossRule
from rlctl.algos.segments import Segments
from rlctl.registry import POLICY_LOSSES
from tests.properties.batches import Batch, by_response, loss_rule, make_batch
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
    """A batch, tokens that are kept (some are rejected), and weights."""
    batch = make_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(batch.unit.total, generator=generator) < 0.8
    token_noise = torch.randn(batch.unit.total, generator=generator)  # a critic's advantages differ by token
    weights = torch.rand(batch.unit.total, generator=generator) * 2
    return replace(batch, advantages=batch.advantages + 0.3 * token_noise), kept, weights


def compute(
    rule: LossRule, log_probs: Tensor, batch: Batch, kept: Tensor, weights: Tensor | None
) -> TokenLoss:
    """Of the tokens that are kept."""
    _, *rest = batch.of_tokens(kept).policies
    return policy_loss(rule, log_probs[kept], *rest, None if weights is None else weights[kept])


def by_reference(rule, log_probs, batch: Batch, kept, weights) -> list[list[tuple[float, bool, bool]]]:
    """`log_probs` move, `batch.log_probs` are what the stopped gradients see."""
    weights = torch.ones_like(batch.advantages) if weights is None else weights
    columns = (log_probs, batch.log_probs, batch.rollout_log_probs, batch.advantages, weights, kept)
    return [reference.policy_loss(rule, *row) for row in by_response(batch.unit, *columns)]


def total_of(values: Tensor, kept: Tensor, counted: Tensor, unit: Segments, mode) -> Tensor:
    """Σ c · ℓ of a batch that is a whole mini-batch; `values` are of the tokens that are kept."""
    counts = float(counted.sum()), float(unit.any(counted).sum())
    c = coefficients(mode, kept, counted, unit, *counts, horizon=HORIZON)
    assert c.dtype == torch.float32
    assert not c[~kept].any()
    return (c[kept] * values).sum()


def test_every_stable_loss_of_the_spec_is_there() -> None:
    assert set(POLICY_LOSSES.stable()) == {rule.name for rule in RULES.values()}


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_equals_the_reference(rule: LossRule, weighted: bool) -> None:
    in_force = torch.zeros(2)
    for seed in range(20):
        batch, kept, weights = make_inputs(seed)
        given = weights if weighted else None
        found = compute(rule, batch.log_probs, batch, kept, given)
        rows = by_reference(rule, batch.log_probs, batch, kept, given)
        expected = torch.tensor([token for row in rows for token in row], dtype=torch.float64)[kept]
        values, clipped, lower = expected.unbind(-1)
        torch.testing.assert_close(found.values, values.float(), rtol=1e-5, atol=1e-6)
        for flags, wanted in ((found.clipped, clipped), (found.clipped_lower, lower)):
            assert torch.equal(torch.zeros_like(wanted).bool() if flags is None else flags, wanted.bool())
        in_force += torch.stack([clipped.sum(), lower.sum()])
    assert bool(in_force[0]) == (rule.name not in {"reinforce", "sapo"})  # else the test tests nothing
    assert bool(in_force[1]) == (rule.clip_c is not None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("denominator", ["before_rejection", "after_rejection"])
def test_the_coefficients_equal_the_reference(mode, denominator: str) -> None:
    for seed in range(10):
        batch, kept, weights = make_inputs(seed)
        values = compute(RULES["ppo"], batch.log_probs, batch, kept, weights).values
        counted = torch.ones_like(kept) if denominator == "before_rejection" else kept
        total = total_of(values, kept, counted, batch.unit, mode)
        every = torch.zeros(len(kept)).masked_scatter(kept, values)
        rows = by_response(batch.unit, every, counted)
        expected = reference.aggregate(*zip(*rows, strict=True), mode, HORIZON)
        assert total.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_shares_of_parts_add_up_to_the_loss(mode) -> None:
    """For any division of the mini-batch that leaves responses whole: the coefficients are the same."""
    batch, kept, _ = make_inputs(6)
    counted = torch.ones_like(kept)
    counts = float(counted.sum()), float(batch.unit.any(counted).sum())
    whole = coefficients(mode, kept, counted, batch.unit, *counts, horizon=HORIZON)
    found = []
    for responses in ([0, 1], [2], [3, 4, 5, 6]):
        places = batch.unit.entries_of(torch.tensor(responses))
        unit = batch.select(responses).unit
        found.append(coefficients(mode, kept[places], counted[places], unit, *counts, horizon=HORIZON))
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradient_equals_finite_differences_of_the_reference(rule: LossRule, mode) -> None:
    batch, kept, weights = make_inputs(3)
    batch, weights = batch.double(), weights.double()

    def slow_total(log_probs: Tensor) -> float:
        rows = by_reference(rule, log_probs, batch, kept, weights)
        values = [[token[0] for token in row] for row in rows]
        return reference.aggregate(values, [[True] * len(row) for row in rows], mode, HORIZON)

    log_probs = batch.log_probs.clone().requires_grad_()
    values = compute(rule, log_probs, batch, kept, weights).values
    total = total_of(values, kept, torch.ones_like(kept), batch.unit, mode)
    (gradient,) = torch.autograd.grad(total, log_probs)
    step = 1e-6
    for t in range(batch.unit.total):
        ends = []
        for sign in (1, -1):
            moved = batch.log_probs.clone()
            moved[t] += sign * step
            ends.append(slow_total(moved))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert gradient[t].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)
    assert gradient[kept].any()
    assert not gradient[~kept].any()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_neither_weights_nor_old_log_probs_receive_gradient(rule: LossRule) -> None:
    batch, _, weights = make_inputs(0)
    log_probs, old = (x.clone().requires_grad_() for x in (batch.log_probs, batch.rollout_log_probs))
    weights.requires_grad_()
    loss = policy_loss(rule, log_probs, old, batch.advantages, batch.unit, weights)
    assert torch.autograd.grad(loss.values.sum(), [weights, old], allow_unused=True) == (None, None)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(rule: LossRule) -> None:
    batch, _, weights = make_inputs(1)
    log_probs = batch.log_probs.clone().requires_grad_()
    loss = policy_loss(rule, log_probs, batch.log_probs, batch.advantages, batch.unit, weights)
    (gradient,) = torch.autograd.grad(loss.values.sum(), log_probs)
    torch.testing.assert_close(gradient, -weights * batch.advantages, rtol=1e-6, atol=1e-7)
    assert not any(flags is not None and flags.any() for flags in (loss.clipped, loss.clipped_lower))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_half_precision_is_widened_and_a_rank_without_tokens_has_a_loss_of_zero(name: str) -> None:
    batch = make_batch(2)
    log_probs, old, advantages, unit = batch.policies
    leaf = log_probs.bfloat16().requires_grad_()
    rule = loss_rule(name, *batch.policies)
    assert policy_loss(rule, leaf, old.bfloat16(), advantages, unit, None).values.dtype == torch.float32
    nothing = batch.of_tokens(torch.zeros(unit.total, dtype=torch.bool))
    leaf, *rest = nothing.policies
    rule = loss_rule(name, leaf, *rest)  # of a mini-batch without tokens
    assert policy_loss(rule, leaf.requires_grad_(), *rest, None).values.shape == (0,)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_ratios_out_of_all_bounds_leave_numbers(rule: LossRule) -> None:
    """Log-ratios of ±100 and tokens of probability 1, as a broken sampler reports them."""
    log_probs = torch.tensor([-100.0, -1e-9, 0.0, -90.0, 0.0]).requires_grad_()
    old = torch.tensor([-1e-9, -100.0, 0.0, 0.0, -90.0])
    for advantage in (1.0, -1.0):
        loss = policy_loss(
            rule, log_probs, old, torch.full((5,), advantage), Segments(torch.tensor([5])), None
        )
        (gradient,) = torch.autograd.grad(loss.values.sum(), log_probs)
        assert loss.values.isfinite().all()
        assert gradient.isfinite().all()


def row_loss(rule: LossRule, ratios: list[float], advantages: list[float]) -> tuple[TokenLoss, Tensor]:
    """One sequence under a uniform π_old of probability 0.1; the loss and its gradient."""
    old = torch.full((len(ratios),), 0.1).log()
    log_probs = (torch.tensor(ratios).log() + old).requires_grad_()
    unit = Segments(torch.tensor([len(ratios)]))
    loss = policy_loss(rule, log_probs, old, torch.tensor(advantages), unit, None)
    return loss, torch.autograd.grad(loss.values.sum(), log_probs)[0]


def test_ppo_clips_only_in_the_direction_that_would_gain() -> None:
    """By hand: r = 2 and r = 0.5 against a clip to [0.8, 1.3], both signs of the advantage."""
    loss, gradient = row_loss(RULES["ppo"], [2.0, 0.5, 2.0, 0.5], [1.0, 1.0, -1.0, -1.0])
    torch.testing.assert_close(loss.values, torch.tensor([-1.3, -0.5, 2.0, 0.8]))
    assert loss.clipped.tolist() == [True, False, False, True]
    torch.testing.assert_close(gradient, torch.tensor([0.0, -0.5, 2.0, 0.0]))


def test_dual_clip_holds_a_runaway_ratio_of_a_bad_token() -> None:
    rule = LossRule("ppo_clip", clip_c=3.0)
    loss, gradient = row_loss(rule, [5.0, 2.5, 5.0], [-1.0, -1.0, 1.0])
    torch.testing.assert_close(loss.values, torch.tensor([3.0, 2.5, -1.2]))
    assert loss.clipped_lower.tolist() == [True, False, False]
    torch.testing.assert_close(gradient, torch.tensor([0.0, 2.5, 0.0]))


def test_cispo_clips_weights_and_keeps_gradients() -> None:
    _, gradient = row_loss(LossRule("cispo"), [2.0, 0.5, 1.1], [1.0, -1.0, 1.0])
    torch.testing.assert_close(gradient, torch.tensor([-1.2, 0.8, -1.1]))


def test_dppo_clips_by_probabilities_not_ratios() -> None:
    """A tenth may double (TV 0.1) but not quadruple (TV 0.3); changes towards the sampler are never
    masked."""
    rule = LossRule("dppo", clip_low=0.15, clip_high=0.15)
    loss, gradient = row_loss(rule, [2.0, 4.0, 4.0, 0.1], [1.0, 1.0, -1.0, -1.0])
    assert loss.clipped.tolist() == [False, True, False, False]
    torch.testing.assert_close(gradient, torch.tensor([-2.0, 0.0, 4.0, 0.1]))


def test_gspo_gradient_is_that_of_the_sequence_objective() -> None:
    """Differentiated through the mean, as the paper writes it; equal advantages within a sequence."""
    batch, kept, _ = make_inputs(4)
    batch = replace(batch, advantages=make_batch(4).advantages)
    rule, unit = RULES["gspo"], batch.unit.kept(kept)
    log_probs = batch.log_probs.clone().requires_grad_()
    values = compute(rule, log_probs, batch, kept, None).values
    total = total_of(values, kept, kept, batch.unit, "seq-mean-token-mean")
    (gradient,) = torch.autograd.grad(total, log_probs)

    objective = torch.zeros(())
    gaps, advantages = (x[kept] for x in (log_probs - batch.rollout_log_probs, batch.advantages))
    for gap, advantage in zip(*(x.split(unit.lengths.tolist()) for x in (gaps, advantages)), strict=True):
        if len(gap):
            ratio = gap.mean().exp()
            clipped = ratio.clamp(1 - rule.clip_low, 1 + rule.clip_high)
            objective = objective + torch.minimum(ratio * advantage[0], clipped * advantage[0])
    loss = -objective / (unit.lengths > 0).sum()
    assert total.item() == pytest.approx(loss.item(), rel=1e-5)
    (expected,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("mode", "expected"), zip(MODES, [3.0, 6.0, 3.0, 1.5], strict=True))
def test_the_mean_of_one_sequence_is_its_own(mode, expected: float) -> None:
    def mean(values: list[float], horizon: int) -> float:
        kept, unit = torch.ones(len(values), dtype=torch.bool), Segments(torch.tensor([len(values)]))
        c = coefficients(mode, kept, kept, unit, float(len(values)), 1.0, horizon=horizon)
        return float((c * torch.tensor(values)).sum())

    assert mean([2.0, 4.0], horizon=4) == expected
    assert mean([6.0], horizon=2) == (3.0 if mode == "seq-mean-token-sum-norm" else 6.0)  # of one token


def test_a_mean_of_nothing_is_zero() -> None:
    nothing, unit = torch.zeros(5, dtype=torch.bool), Segments(torch.tensor([2, 0, 3]))
    for mode in MODES:
        assert not coefficients(mode, nothing, nothing, unit, 0.0, 0.0, horizon=3).any()


def test_a_loss_of_padded_tensors_is_a_clear_error(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def old(rule, inputs):\n    return (inputs.advantages * inputs.mask).sum(-1)\n")
    with pytest.raises(AttributeError, match=r"no attribute mask: .*docs/how-to/extend.md"):
        policy_loss(LossRule(f"{file}:old"), *make_batch(0).policies, None)
    assert not hasattr(LossInputs(*make_batch(0).policies), "anything")
