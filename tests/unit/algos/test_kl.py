"""KL estimates against the slow reference; what their gradients estimate, by enumeration; the controller."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
from torch import Tensor

from rlctl.algos.kl import KLController, kl_estimate, kl_loss
from rlctl.algos.segments import Segments
from rlctl.registry import KL_ESTIMATORS
from tests.properties.batches import by_response, make_batch
from tests.properties.test_correction_exactness import (
    HORIZON,
    MASK,
    STATES,
    log_probs_of,
    policy,
    probabilities,
)
from tests.reference import kl as reference

ESTIMATES = [part.name for part in KL_ESTIMATORS.parts() if not part.needs]
LOSSES = list(KL_ESTIMATORS)


@pytest.mark.parametrize("kind", LOSSES)
def test_equals_the_reference(kind) -> None:
    for seed in range(10):
        batch = make_batch(seed)
        old, ref = batch.rollout_log_probs, batch.rollout_log_probs + 0.3
        found = kl_loss(kind, batch.log_probs, ref, old, batch.unit)
        for log_probs, of_ref, of_old, penalties in by_response(batch.unit, batch.log_probs, ref, old, found):
            assert penalties == pytest.approx(by_token(kind, log_probs, of_ref, of_old), rel=1e-4, abs=1e-6)
        if kind in ESTIMATES:
            torch.testing.assert_close(kl_estimate(kind, batch.log_probs, ref), found)


@pytest.mark.parametrize("kind", LOSSES)
def test_gradient_equals_finite_differences(kind) -> None:
    batch = make_batch(5)
    ref = batch.rollout_log_probs + 0.3
    log_probs, old = (x.clone().requires_grad_() for x in (batch.log_probs.double(), batch.rollout_log_probs))
    ref.requires_grad_()
    total = kl_loss(kind, log_probs, ref, old, batch.unit).sum()
    gradient, *constants = torch.autograd.grad(total, [log_probs, ref, old], allow_unused=True)
    assert constants == [None, None]
    for at, of_ref, of_old, slopes in by_response(batch.unit, log_probs, ref, old, gradient):
        for t, slope in enumerate(slopes):
            ends = []
            for sign in (1, -1):
                moved = at.copy()
                moved[t] += sign * 1e-6
                ends.append(sum(by_token(kind, moved, of_ref, of_old)))
            assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)


def by_token(kind, log_probs: list[float], ref: list[float], old: list[float]) -> list[float]:
    """One response's penalties, token by token."""
    found, before = [], 0.0
    for at, of_ref, of_old in zip(log_probs, ref, old, strict=True):
        found.append(reference.estimate(kind, at, of_ref, of_old, before))
        before += at - of_old
    return found


def test_what_the_values_and_the_gradients_estimate() -> None:
    """Enumerate every token of a small vocabulary, weighted by how often it is sampled."""
    generator = torch.Generator().manual_seed(0)
    logits, ref, old = (torch.randn(5, generator=generator).double().log_softmax(-1) for _ in range(3))
    logits.requires_grad_()
    one_each = Segments(torch.ones(5, dtype=torch.int64))

    def expected_gradient(kind: str, sampler: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        loss = kl_loss(kind, log_probs, ref, sampler.detach(), one_each)
        return torch.autograd.grad((sampler.detach().exp() * loss).sum(), logits)[0]

    log_probs = logits.log_softmax(-1)
    reverse = (log_probs.exp() * (log_probs - ref)).sum()
    forward = (ref.exp() * (ref - log_probs)).sum()
    to_reverse, to_forward = (
        torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (reverse, forward)
    )

    assert reverse.item() == pytest.approx(reference.divergence(log_probs.exp().tolist(), ref.exp().tolist()))
    for kind in ("k1", "k3"):
        mean = (log_probs.exp() * kl_estimate(kind, log_probs, ref)).sum()
        assert mean.item() == pytest.approx(reverse.item())

    here = log_probs.detach()
    torch.testing.assert_close(expected_gradient("k1", here), torch.zeros(5).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(expected_gradient("k2", here), to_reverse)
    torch.testing.assert_close(expected_gradient("k3", here), to_forward)
    torch.testing.assert_close(expected_gradient("unbiased", here), to_reverse)
    torch.testing.assert_close(expected_gradient("unbiased", old), to_reverse)
    assert (expected_gradient("k2", old) - to_reverse).abs().max() > 1e-2  # the others are off off-policy


def gradient_through_reward(values: Tensor, logits: Tensor) -> Tensor:
    """E_θ[value · ∇ log π_θ] over one token: what a policy gradient makes of a constant penalty."""
    log_probs = logits.log_softmax(-1)
    surrogate = (log_probs.detach().exp() * values.detach() * log_probs).sum()
    return torch.autograd.grad(surrogate, logits)[0]


def test_what_the_gradients_estimate_in_the_reward() -> None:
    """Only k1 has the gradient of the KL; near the reference, the others have hardly any in its direction."""
    draw = torch.Generator().manual_seed(0)
    cosines, shares = {"k2": [], "k3": [], "abs": []}, {"k2": [], "k3": [], "abs": []}
    for _ in range(300):
        ref = torch.randn(5, generator=draw).double().log_softmax(-1)
        logits = (ref + 0.01 * torch.randn(5, generator=draw).double()).requires_grad_()
        log_probs = logits.log_softmax(-1)
        gap, probs = log_probs - ref, log_probs.exp()
        terms = {"reverse": (probs * gap).sum(), "forward": -(ref.exp() * gap).sum()}
        terms["k2"] = (probs * 0.5 * gap.square()).sum()
        of = {name: torch.autograd.grad(x, logits, retain_graph=True)[0] for name, x in terms.items()}
        found = {
            kind: gradient_through_reward(kl_estimate(kind, log_probs, ref), logits)
            for kind in ("k1", "k2", "k3")
        }
        torch.testing.assert_close(found["k1"], of["reverse"], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found["k2"], of["k2"] - of["reverse"], rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(found["k3"], of["reverse"] - of["forward"], rtol=1e-6, atol=1e-12)
        found["abs"] = gradient_through_reward(gap.abs(), logits)
        for kind, each in cosines.items():
            each.append(torch.cosine_similarity(found[kind], of["reverse"], 0).item())
            shares[kind].append((found[kind].norm() / of["reverse"].norm()).item())
    assert all(abs(fmean(each)) < 0.15 for each in cosines.values())  # docs/reference/algorithms.md
    assert fmean(shares["k2"]) == pytest.approx(0.004, abs=1e-3)
    assert fmean(shares["k3"]) == pytest.approx(0.004, abs=1e-3)
    assert 0.4 < fmean(shares["abs"]) < 1.0


def sequence_kl(train: Tensor, ref: Tensor) -> Tensor:
    """KL(π_θ ‖ π_ref) over the distribution of whole sequences, by its definition."""
    ours, theirs = log_probs_of(train).sum(-1), log_probs_of(ref).sum(-1)
    return (ours.exp() * (ours - theirs)).sum()


@pytest.mark.parametrize("seed", range(5))
def test_what_the_gradients_estimate_of_whole_sequences(seed: int) -> None:
    """All 15 sequences of a policy over three tokens, each with its probability under the sampler."""
    train, ref, rollout = policy(seed), policy(50 + seed).detach(), policy(100 + seed).detach()
    wanted = torch.autograd.grad(sequence_kl(train, ref), train)[0]
    sampler = probabilities(log_probs_of(rollout))
    tables = [x.log_softmax(-1)[torch.arange(HORIZON), STATES] for x in (train, ref)]  # (15, 3, vocabulary)
    per_state = (tables[0].exp() * (tables[0] - tables[1])).sum(-1)
    conditional = (sampler[:, None] * MASK * per_state).sum()  # prefixes are the sampler's, and constants

    def expected(kind: str) -> Tensor:
        """∇ of E_rollout[Σ_t penalty_t], through the code that trains."""
        columns = (log_probs_of(x)[MASK] for x in (train, ref, rollout))
        unit = Segments(MASK.sum(1))
        loss = kl_loss(kind, *columns, unit)
        return torch.autograd.grad((unit.spread(sampler) * loss).sum(), train)[0]

    torch.testing.assert_close(expected("sequence"), wanted, rtol=1e-9, atol=1e-12)
    own = log_probs_of(train)
    penalty = (kl_estimate("k1", own, log_probs_of(ref)) * MASK).sum(-1).detach()
    in_reward = (own.sum(-1).exp().detach() * penalty * (own * MASK).sum(-1)).sum()
    torch.testing.assert_close(torch.autograd.grad(in_reward, train)[0], wanted, rtol=1e-9, atol=1e-12)
    frozen = torch.autograd.grad(conditional, train)[0]
    torch.testing.assert_close(expected("unbiased"), frozen, rtol=1e-9, atol=1e-12)
    off = ((expected("unbiased") - wanted).norm() / wanted.norm()).item()
    assert 0.255 < off < 0.855  # docs/reference/algorithms.md


@pytest.mark.parametrize("size", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_a_policy_near_the_reference_keeps_its_digits(kind: str, size: float) -> None:
    """In float32, as in training: π/π_ref − 1 is smaller than the rounding of π/π_ref."""
    ref = torch.full((1000,), -1.0)
    log_probs = ref + size * torch.randn(1000, generator=torch.Generator().manual_seed(1))
    exact = kl_estimate(kind, log_probs.double(), ref.double())
    found = kl_estimate(kind, log_probs, ref)
    assert (found >= 0.0).all()
    assert found.mean().item() == pytest.approx(exact.mean().item(), rel=1e-3)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_policy_far_from_the_reference_leaves_numbers(kind) -> None:
    log_probs = torch.tensor([-90.0, -1e-9]).requires_grad_()
    far = torch.tensor([-1e-9, -90.0])
    values = kl_loss(kind, log_probs, far, far, Segments(torch.tensor([2])))
    assert values.isfinite().all()
    assert torch.autograd.grad(values.sum(), log_probs)[0].isfinite().all()


def test_an_adaptive_coefficient_moves_towards_the_target() -> None:
    start = KLController(kl_coef=0.2, target_kl=6.0, horizon=10_000)
    assert start.updated(6.0, 256).kl_coef == 0.2
    assert start.updated(6.6, 256).kl_coef == pytest.approx(0.2 * (1 + 0.1 * 256 / 10_000))
    assert start.updated(600.0, 256).kl_coef == pytest.approx(0.2 * (1 + 0.2 * 256 / 10_000))
    assert start.updated(0.0, 256).kl_coef == pytest.approx(0.2 * (1 - 0.2 * 256 / 10_000))
    assert start.updated(math.nan, 256) == start
    assert start.updated(math.inf, 256).kl_coef > 0.2
    small = KLController(kl_coef=0.2, target_kl=6.0, horizon=10)
    assert small.updated(0.0, 256).kl_coef == pytest.approx(0.16)  # never negative
    fixed = KLController(kl_coef=0.2, target_kl=None, horizon=10_000)
    assert fixed.updated(600.0, 256) == fixed
