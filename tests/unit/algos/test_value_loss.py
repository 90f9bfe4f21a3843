"""The critic's loss against the slow reference and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlctl.algos.losses import value_loss
from tests.reference import losses as reference

CLIP = 0.2


def make_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, old values, returns."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(20, generator=generator, dtype=torch.float64)
    new, returns = (
        old + scale * torch.randn(20, generator=generator, dtype=torch.float64) for scale in (0.3, 0.5)
    )
    return new, old, returns


@pytest.mark.parametrize("seed", range(10))
def test_equals_the_reference_and_finite_differences(seed: int) -> None:
    values, old, returns = make_inputs(seed)
    for x in (values, old, returns):
        x.requires_grad_()
    loss = value_loss(values, old, returns, clip=CLIP)
    gradient, *constants = torch.autograd.grad(loss.values.sum(), [values, old, returns], allow_unused=True)
    assert constants == [None, None]
    for t in range(20):
        numbers = [x[t].item() for x in (values, old, returns)]
        expected, clipped = reference.value_loss(*numbers, clip_range=CLIP)
        assert loss.values[t].item() == pytest.approx(expected)
        assert loss.clipped[t].item() == clipped
        moved = [(numbers[0] + sign * 1e-6, *numbers[1:]) for sign in (1, -1)]
        ends = [reference.value_loss(*at, clip_range=CLIP)[0] for at in moved]
        assert gradient[t].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-8)


def test_by_hand() -> None:
    """Old value 0, clip 0.2: towards the return the gain stops at 0.2, away from it nothing is forgiven."""
    values, zeros = torch.tensor([0.1, 0.5, -0.5], requires_grad=True), torch.zeros(3)
    loss = value_loss(values, zeros, zeros + 1.0, clip=CLIP)
    torch.testing.assert_close(loss.values, torch.tensor([0.405, 0.32, 1.125]))
    assert loss.clipped.tolist() == [False, True, False]
    (gradient,) = torch.autograd.grad(loss.values.sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([-0.9, 0.0, -1.5]))
