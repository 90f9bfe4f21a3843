"""The critic's loss against the slow reference and finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlctl.algos.losses import value_loss
from tests.properties.batches import make_batch
from tests.reference import losses as reference

CLIP = 0.2


def make_inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, old values, returns (NaN outside the mask), mask."""
    mask = make_batch(seed).mask
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    new, returns = (
        old + scale * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
        for scale in (0.3, 0.5)
    )
    new, old, returns = (x.masked_fill(~mask, math.nan) for x in (new, old, returns))
    return new, old, returns, mask


@pytest.mark.parametrize("seed", range(10))
def test_equals_the_reference_and_finite_differences(seed: int) -> None:
    values, old, returns, mask = make_inputs(seed)
    for x in (values, old, returns):
        x.requires_grad_()
    loss = value_loss(values, old, returns, mask, clip=CLIP)
    gradient, *constants = torch.autograd.grad(loss.values.sum(), [values, old, returns], allow_unused=True)
    assert constants == [None, None]
    assert not loss.values[~mask].any()
    assert not gradient[~mask].any()
    assert not loss.clipped[~mask].any()
    for row, t in mask.nonzero().tolist():
        numbers = [x[row, t].item() for x in (values, old, returns)]
        expected, clipped = reference.value_loss(*numbers, clip_range=CLIP)
        assert loss.values[row, t].item() == pytest.approx(expected)
        assert loss.clipped[row, t].item() == clipped
        moved = [(numbers[0] + sign * 1e-6, *numbers[1:]) for sign in (1, -1)]
        ends = [reference.value_loss(*at, clip_range=CLIP)[0] for at in moved]
        assert gradient[row, t].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-8)


def test_by_hand() -> None:
    """Old value 0, clip 0.2: towards the return the gain stops at 0.2, away from it nothing is forgiven."""
    values, zeros = torch.tensor([[0.1, 0.5, -0.5]], requires_grad=True), torch.zeros(1, 3)
    loss = value_loss(values, zeros, zeros + 1.0, torch.ones(1, 3, dtype=torch.bool), clip=CLIP)
    torch.testing.assert_close(loss.values, torch.tensor([[0.405, 0.32, 1.125]]))
    assert loss.clipped.tolist() == [[False, True, False]]
    (gradient,) = torch.autograd.grad(loss.values.sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([[-0.9, 0.0, -1.5]]))
