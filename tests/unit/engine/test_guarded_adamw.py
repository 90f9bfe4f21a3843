"""A withheld step leaves weights, moments and step counters as they were."""

from __future__ import annotations

import math

import pytest
import torch

from rlctl.engine.deepspeed import GuardedAdamW, _is_finite


def stepped(clip_norm: float | None = None) -> tuple[torch.nn.Linear, GuardedAdamW]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = GuardedAdamW(model.parameters(), lr=0.1)
    optimizer.clip_norm = clip_norm
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not optimizer.withheld
    return model, optimizer


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [t.detach().clone() for t in (*model.parameters(), *states)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("clip_norm", [None, 0.0, 1.0])
def test_nonfinite_gradient_is_withheld(bad: float, clip_norm: float | None) -> None:
    model, optimizer = stepped(clip_norm)
    before = snapshot(model, optimizer)
    model.bias.grad[1] = bad
    optimizer.step()
    assert optimizer.withheld
    for old, new in zip(before, snapshot(model, optimizer), strict=True):
        assert torch.equal(old, new)


def test_skip_withholds_once() -> None:
    model, optimizer = stepped()
    before = snapshot(model, optimizer)
    optimizer.skip = True
    optimizer.step()
    assert optimizer.withheld
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer), strict=True))
    optimizer.skip = False
    optimizer.step()
    assert not optimizer.withheld
    assert not torch.equal(before[0], model.weight)


@pytest.mark.parametrize(("clip", "expected"), [(0.0, 30.0), (3.0, 3.0), (100.0, 30.0)])
def test_norm_is_that_before_clipping(clip: float, expected: float) -> None:
    model, optimizer = stepped(clip)
    model.weight.grad = torch.tensor([[30.0, 0, 0], [0, 0, 0]])
    model.bias.grad.zero_()
    optimizer.step()
    assert optimizer._global_grad_norm == pytest.approx(30.0)
    assert float(model.weight.grad.norm()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 17, 63])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(bad: float | None, dtype, place: int) -> None:
    gradient = torch.linspace(-1e30, 1e30, 64, dtype=dtype)
    if bad is not None:
        gradient[place] = bad
    assert _is_finite(gradient) == (bad is None)
    assert _is_finite(gradient[:0])
